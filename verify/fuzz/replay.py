"""Every input of some folders for one Python target: `python -m verify.fuzz.replay TARGET DIR…`."""

from __future__ import annotations

import sys
from pathlib import Path

from verify.fuzz.python import load


def replay(target: str, corpora: list[Path]) -> None:
    run = load(target).run
    run(b"")
    for corpus in corpora:
        for path in sorted(corpus.iterdir()):
            try:
                run(path.read_bytes())
            except Exception as error:
                error.add_note(f"input: {path}")
                raise


if __name__ == "__main__":
    replay(sys.argv[1], [Path(folder) for folder in sys.argv[2:]])
