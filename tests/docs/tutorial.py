"""docs/tutorial.md, typed as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.docs.console import Shell, Step, sessions

ROOT: Final = Path(__file__).parents[2]
VLLM: Final = "The same with vLLM"


def type_tutorial(folder: Path, *, without: str = "") -> None:
    """Runs the commands of the tutorial, except below `without`, and checks their output."""
    shell = Shell(folder)
    try:
        shell.take(Step(f"clone={ROOT}", []))
        for title, steps in sessions((ROOT / "docs/tutorial.md").read_text()).items():
            for step in steps if title != without else ():
                shell.take(step)
    finally:
        shell.close()
        for log in sorted(folder.glob("*.log")):
            print(f"== {log.name}\n{log.read_text(errors='replace')[-1000:]}")
