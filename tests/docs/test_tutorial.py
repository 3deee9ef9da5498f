"""docs/tutorial.md, as written: what is typed there prints what is shown there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.console import Shell, sessions

TUTORIAL = sessions((Path(__file__).parents[2] / "docs/tutorial.md").read_text())


@pytest.mark.realtime
@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    try:
        for steps in TUTORIAL.values():
            for step in steps:
                shell.take(step)
    finally:
        shell.close()
        for log in sorted(tmp_path.glob("*.log")):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-1000:]}")
