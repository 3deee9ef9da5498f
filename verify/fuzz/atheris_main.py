"""Runs one Python target under atheris: `python -m verify.fuzz.atheris_main TARGET [OPTIONS]`.

The options and folders are those of libFuzzer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType

import atheris


class _PlainLoaders:
    """A finder that gives kvxfer's modules, also of an editable installation, Python's standard
    loaders: atheris instruments no module of another loader, and would fuzz blindly."""

    def __init__(self) -> None:
        self._finders = tuple(sys.meta_path)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "kvxfer":
            return None
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        spec = next(filter(None, found), None)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return spec
        places = spec.submodule_search_locations
        return spec_from_file_location(name, spec.origin, submodule_search_locations=places)


def main() -> None:
    name = sys.argv.pop(1)
    sys.meta_path.insert(0, _PlainLoaders())
    # Only the packages of the decoders; dependencies are not instrumented.
    with atheris.instrument_imports(include=["kvxfer"]):
        from verify.fuzz.python import load

        run = load(name).run
    logging.disable()  # refusals are logged
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
