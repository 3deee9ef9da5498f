"""The reading of a fuzzer's output by `make fuzz`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from verify.fuzz import inputs, run, seeds
from verify.fuzz.coverage import Coverage

pytestmark = pytest.mark.native

_FOUND = (
    "import pathlib, sys; pathlib.Path(sys.argv[1] + 'crash-1').write_bytes(b'bad'); sys.exit(77)"
)
_BLIND = "print('WARNING: no interesting inputs. Is the code instrumented for coverage?')"
_WELL = "print('stat::number_of_executed_units: 7')"


@pytest.fixture
def fuzzers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Programs that stand in for fuzzers, by target; their first argument is the prefix of the
    inputs that they write."""
    programs: dict[str, str] = {}

    def command(target: str, options: list[str]) -> tuple[list[str], None]:
        [prefix] = [o.partition("=")[2] for o in options if o.startswith("-artifact_prefix")]
        return [sys.executable, "-c", programs[target], prefix], None

    def coverage(target: str, *_: object) -> Coverage:
        reached = Coverage()
        reached.add("decoder.py", {1: True, 2: target != "b"})
        return reached

    kind = SimpleNamespace(command=command, coverage=coverage)
    monkeypatch.setattr(run, "TARGETS", dict.fromkeys(("a", "b", "c"), kind))
    monkeypatch.setattr(run, "WORK", tmp_path / "findings")
    monkeypatch.setattr(run.native, "ROOT", tmp_path)
    monkeypatch.setattr(run, "SEEDS", tmp_path / "seeds")
    monkeypatch.setattr(seeds, "of", lambda target: [target.encode()])
    monkeypatch.setattr(inputs, "CORPUS", tmp_path / "corpus")
    for target in run.TARGETS:
        programs[target] = _WELL
    return programs


def outcomes(jobs: int, with_coverage: bool = False) -> list[run.Outcome]:
    return run.fuzz_all(["a", "b", "c"], 1, jobs, Console(quiet=True), with_coverage)


@pytest.mark.parametrize("jobs", [1, 3])
def test_outcomes_are_in_the_order_of_the_targets(
    fuzzers: dict[str, str], jobs: int, tmp_path: Path
) -> None:
    if jobs == 3:
        pipe = tmp_path / "held until c ends"
        os.mkfifo(pipe)
        fuzzers["a"] = f"open({str(pipe)!r}).read(); {_WELL}"
        fuzzers["c"] = f"held = open({str(pipe)!r}, 'w'); {_WELL}"
    assert [(each.target, each.executions, each.good) for each in outcomes(jobs)] == [
        ("a", 7, True),
        ("b", 7, True),
        ("c", 7, True),
    ]


def test_an_input_that_crashes_a_target_is_in_its_corpus_from_then_on(
    fuzzers: dict[str, str], tmp_path: Path
) -> None:
    fuzzers["b"] = _FOUND
    assert [each.good for each in outcomes(2)] == [True, False, True]
    [(name, kept)] = inputs.found("b").items()
    assert name.startswith("found-")
    assert kept == b"bad"
    assert not inputs.found("a")


def test_a_target_without_coverage_of_a_line_fails(fuzzers: dict[str, str]) -> None:
    fuzzers["c"] = _BLIND
    assert [each.good for each in outcomes(2)] == [True, True, False]


def test_with_coverage_lines_that_nothing_reaches_are_a_failure(
    fuzzers: dict[str, str],
) -> None:
    assert [each.coverage for each in outcomes(2)] == [None] * 3
    assert [(each.coverage, each.good) for each in outcomes(2, with_coverage=True)] == [
        (100.0, True),
        (50.0, False),
        (100.0, True),
    ]
