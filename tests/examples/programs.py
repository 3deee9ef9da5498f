"""Runs the programs of examples/python as users do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

EXAMPLES: Final = Path(__file__).parents[2] / "examples/python"


def run_example(name: str, *arguments: str) -> list[str]:
    """Returns the lines that the program prints. It must exit with 0 and without a traceback."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()
