"""One Python target under atheris: `python -m tests.fuzz.atheris_main TARGET [OPTIONS]`, options
and folders as libFuzzer has them."""

from __future__ import annotations

import logging
import sys

import atheris


def main() -> None:
    name = sys.argv.pop(1)
    # What the decoders are part of; dependencies are not looked into.
    with atheris.instrument_imports(include=["kvxfer"]):
        from tests.fuzz.python import load

        run = load(name).run
    logging.disable()  # what is refused is logged
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
