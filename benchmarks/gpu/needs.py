"""Checks whether a Python has all that the benchmark needs: `python needs.py`. Installs nothing.

Prints the folder of pybind11's headers. If something is missing, prints what, where it looked and
what to do, and ends with exit code 1. Imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

MODULES: Final = {
    "torch": "torch",
    "triton": "triton",
    "numpy": "numpy",
    "msgspec": "msgspec",
    "jwt": "pyjwt",
    "safetensors": "safetensors",
    "typing_extensions": "typing_extensions",
}
"""The imported modules, and the package of each."""

_HEADER: Final = "pybind11/pybind11.h"


def folder_of(module: str) -> Path | None:
    """Returns the folder of a module, without an import; None if it is missing."""
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def missing_modules(find: Callable[[str], Path | None] = folder_of) -> list[str]:
    """Returns the packages that are missing."""
    return [package for module, package in MODULES.items() if find(module) is None]


def header_folders(find: Callable[[str], Path | None] = folder_of) -> list[Path]:
    """Returns the folders that may have pybind11's headers: of the package, of torch, of the
    system."""
    packages = [find("pybind11"), find("torch")]
    folders = [package / "include" for package in packages if package is not None]
    return [*folders, Path(sysconfig.get_paths()["include"]), Path("/usr/include")]


def headers_in(folders: Iterable[Path]) -> Path | None:
    return next((folder for folder in folders if (folder / _HEADER).is_file()), None)


def complaints(missing: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Returns why the benchmark cannot run; empty if it can."""
    said = []
    if missing:
        said.append(
            f"{sys.executable} has no {', '.join(missing)}; carry the wheels along, and name their "
            "folder in PYTHONPATH"
        )
    if headers_in(folders) is None:
        looked = ", ".join(map(str, folders))
        said.append(f"no {_HEADER} in {looked}; install pybind11, or a torch that brings it")
    return said


def main() -> int:
    folders = header_folders()
    said = complaints(missing_modules(), folders)
    for line in said:
        print(f"bench-gpu: {line}", file=sys.stderr)
    if not said:
        print(headers_in(folders))
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
