"""The targets of the Makefile, and their suites in scripts/run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from verify.__main__ import STEPS

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[1]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_make_prints_every_target_with_its_suites() -> None:
    printed = make().stdout
    (targets,) = re.findall(r"^TARGETS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    asked = re.findall(r"^  make (\w+)", printed, re.MULTILINE)
    assert ["help", *dict.fromkeys(asked)] == targets.split()
    assert re.search(r"^  make chaos SUITE=moe +\w", printed, re.MULTILINE)


def test_an_unknown_suite_is_an_error_that_lists_the_known_ones() -> None:
    done = make("simulate", "SUITE=no such")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "make: simulate has no suite 'no such'; it has moe"
    assert "it has none" in make("lint", "SUITE=moe").stderr


def test_each_step_of_verify_has_a_suite() -> None:
    printed = make().stdout
    for step in STEPS:
        suite = f" SUITE={step.suite}" if step.suite else ""
        assert f"  make {step.target}{suite} " in printed


def test_each_benchmark_has_a_smoke_size() -> None:
    assert "control-endurance" in benchmarks.suites()
