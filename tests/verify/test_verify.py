"""`make verify`: what has passed is not run again, and each step has to say what it proved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verify import __main__ as verify

pytestmark = pytest.mark.native


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `make verify` with two steps of the test's own; returns its exit status."""
    monkeypatch.setattr(verify, "WORK", tmp_path / "work")
    monkeypatch.setattr(verify, "ROOT", tmp_path)
    monkeypatch.setattr(verify, "digest_of_tree", lambda: "a tree")
    monkeypatch.setattr(
        verify, "STEPS", (verify.Step("one", "", ""), verify.Step("two", "", "", {"N": "3"}))
    )

    def run(one: str, two: str, *arguments: str) -> int:
        (tmp_path / "Makefile").write_text(f"one:\n\t@{one}\ntwo:\n\t@{two}\n")
        monkeypatch.setattr("sys.argv", ["verify", *arguments])
        return verify.main()

    return run


def test_a_step_that_has_passed_is_not_run_again(
    steps: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    good = "echo ran >>ran; echo proved: 3 things"
    assert steps(good, "echo $(N); false") == 1
    assert steps(good, "echo proved: $(N) more") == 0
    assert (tmp_path / "ran").read_text() == "ran\n"
    shown = capsys.readouterr().out
    assert "3 things" in shown
    assert "3 more" in shown
    assert steps(good, "echo proved: all", "--again") == 0
    assert (tmp_path / "ran").read_text() == "ran\nran\n"


def test_a_step_of_another_tree_is_run_again(
    steps: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = "echo ran >>ran; echo proved: 3 things"
    assert steps(good, "echo proved: it") == 0
    monkeypatch.setattr(verify, "digest_of_tree", lambda: "another tree")
    assert steps(good, "echo proved: it") == 0
    assert (tmp_path / "ran").read_text() == "ran\nran\n"


def test_a_step_that_says_nothing_of_what_it_proved_has_failed(steps: Callable[..., int]) -> None:
    assert steps("true", "echo proved: it") == 1


@pytest.mark.parametrize(
    ("log", "proved"),
    [
        ("x\nproved: 0 of 10 rounds hung\n", "0 of 10 rounds hung"),
        ("===== 65 passed, 3 skipped in 12.00s =====\n", "65 passed, 3 skipped in 12.00s"),
        (
            "[doctest] test cases: 154 | 154 passed | 0 failed | 0 skipped\n",
            "154 passed | 0 failed",
        ),
        ("[doctest] test cases: 9 | 8 passed | 1 failed | 0 skipped\n", ""),
        ("nothing\n", ""),
    ],
)
def test_the_results_of_programs_and_test_runners_are_read(log: str, proved: str) -> None:
    assert verify.what_it_proved(log) == proved
