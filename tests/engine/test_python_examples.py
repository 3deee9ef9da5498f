"""The Python programs of examples/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.native

EXAMPLES = Path(__file__).parents[2] / "examples/python"


def test_latency_of_engines_that_are_polled() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "latency.py", "20"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    local, tcp = done.stdout.splitlines()
    assert re.fullmatch(r"local +[\d.]+ us", local)
    assert re.fullmatch(r"tcp +[\d.]+ us", tcp)
