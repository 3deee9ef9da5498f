"""The source of the topology: /sys, or a recorded tree in its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvxfer.errors import InvalidArgument

_FOLDERS = ("bus", "class", "devices")


@dataclass(frozen=True, slots=True)
class Sysfs:
    """A sysfs; paths are relative to its `folder`, which is /sys on the host itself."""

    folder: Path = Path("/sys")

    @classmethod
    def below(cls, root: Path) -> Sysfs:
        """Returns the sysfs of a host whose / is `root`."""
        return cls(root / "sys")

    @classmethod
    def recorded(cls, folder: Path) -> Sysfs:
        """Returns a recorded tree: a folder in place of /, or a sys folder itself, whatever its
        name.

        Raises InvalidArgument if it is neither.
        """
        for candidate in (folder / "sys", folder):
            if any((candidate / each).is_dir() for each in _FOLDERS):
                return cls(candidate)
        raise InvalidArgument(
            f"{folder} holds no sysfs: give a folder that contains sys/, or a copy of /sys itself "
            f"with {', '.join(_FOLDERS[:-1])} and {_FOLDERS[-1]} in it"
        )

    def text(self, path: str) -> str | None:
        """Reads a file, stripped; None if it is missing or cannot be read."""
        try:
            return (self.folder / path).read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None

    @property
    def routes(self) -> str:
        """The kernel's IPv4 routes, from the proc/ beside a folder that is called sys; empty if
        there is none."""
        try:
            file = self.folder.parent / "proc/net/route"
            return file.read_text() if self.folder.name == "sys" else ""
        except (OSError, UnicodeDecodeError):
            return ""

    def names(self, path: str) -> list[str]:
        """Lists a folder, in order; empty if it is missing."""
        try:
            return sorted(entry.name for entry in (self.folder / path).iterdir())
        except OSError:
            return []

    def link_name(self, path: str) -> str | None:
        """Returns the last part of a symlink's target, which need not exist."""
        try:
            return (self.folder / path).readlink().name
        except OSError:
            return None

    def device_path(self, path: str) -> tuple[str, ...] | None:
        """Returns the parts of a device's real path below devices/; None if it leads nowhere."""
        try:
            real = (self.folder / path).resolve(strict=True)
            return real.relative_to((self.folder / "devices").resolve()).parts
        except (OSError, RuntimeError, ValueError):  # missing, a loop of symlinks, outside
            return None
