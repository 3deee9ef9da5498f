"""The first inputs of every target, from real encodings: a fuzzer that starts from valid input
reaches more of a decoder.

`python -m verify.fuzz.seeds --into DIR` writes them. The seeds of C++ targets need only the
standard library, because the build of the C++ tests writes them.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from verify.fuzz import inputs

_MODULES: Final = {
    "engine": (
        "handshake",
        "bootstrap",
        "control",
        "tcp_lane",
        "tcp_lane_gpu",
        "local_path",
        "local_path_gpu",
        "rendezvous",
        "descriptors",
    ),
    "kv": ("messages", "tickets", "endpoint", "brokered"),
    "http": ("answers", "router_bodies", "sglang_bootstrap", "spans"),
    "registry": ("redis_records",),
}
TARGETS: Final = tuple(target for targets in _MODULES.values() for target in targets)


def of(target: str) -> Iterator[bytes]:
    """Yields the seeds of a target: the same bytes each time."""
    [module] = (module for module, targets in _MODULES.items() if target in targets)
    yield from getattr(importlib.import_module(f"{__name__}.{module}"), target)()


def write(target: str, folder: Path) -> None:
    """Writes the seeds of a target. They replace the contents of the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, content in enumerate(of(target)):
        (folder / f"seed-{number:03}").write_bytes(content)


def folders(target: str, into: Path) -> list[Path]:
    """Writes the seeds of a target, and what fuzzing found, below `into`. Returns their folders."""
    written = into / target
    write(target, written)
    findings = into / "found" / target
    findings.mkdir(parents=True, exist_ok=True)
    for name, content in inputs.found(target).items():
        (findings / name).write_bytes(content)
    return [written, findings]
