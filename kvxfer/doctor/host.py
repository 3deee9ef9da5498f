"""The host that the checks examine; a test can put another one in its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_LIBRARY_FOLDERS = (
    "opt/amazon/efa/lib",
    "opt/amazon/efa/lib64",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/cuda/compat",
)


@dataclass(frozen=True, slots=True)
class Host:
    """The file system below `root`, and the environment."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def text(self, path: str) -> str | None:
        """Reads a file of /proc or /sys, stripped; None if it is missing or cannot be read."""
        try:
            return (self.root / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    def entries(self, path: str) -> list[Path]:
        """Lists a folder, ordered by name; empty if it is missing."""
        try:
            return sorted((self.root / path).iterdir())
        except OSError:
            return []

    def library(self, soname: str) -> Path | None:
        """Returns the path at which the dynamic linker would find a library. It is not loaded: some
        libraries change the process that loads them."""
        extra = self.environment.get("LD_LIBRARY_PATH", "").split(":")
        folders = [Path(each) for each in extra if each]
        folders += [self.root / each for each in _LIBRARY_FOLDERS]
        return next((folder / soname for folder in folders if (folder / soname).exists()), None)
