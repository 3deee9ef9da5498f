"""Runs a Python target on all inputs in folders: `python -m verify.fuzz.replay TARGET DIR…`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from verify.fuzz.python import load


def replay(target: str, folders: Iterable[Path]) -> None:
    """Runs the target on each input. Raises the target's error, with a note that names the
    input."""
    run = load(target).run
    run(b"")
    for folder in folders:
        for path in sorted(folder.iterdir()):
            try:
                run(path.read_bytes())
            except Exception as error:
                error.add_note(f"input: {path}")
                raise


if __name__ == "__main__":
    replay(sys.argv[1], [Path(folder) for folder in sys.argv[2:]])
