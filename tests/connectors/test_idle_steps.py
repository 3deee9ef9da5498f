"""The waits of a vLLM worker in steps that compute nothing."""

from __future__ import annotations

import pytest

from kvxfer.connectors.vllm.idle_steps import MOST_SECONDS, IdleSteps
from kvxfer.connectors.vllm.quiet_queue import VARIABLE, spin_seconds
from tests.virtual_time import VirtualClock


def test_the_wait_grows_with_the_idleness_and_ends_with_the_first_token() -> None:
    clock = VirtualClock()
    steps = IdleSteps(allowed=True, clock=clock)
    assert steps.step(0) == 0, "the first one may be between two batches"
    clock.advance(0.004)
    assert steps.step(0) == pytest.approx(0.002)
    clock.advance(0.080)
    assert steps.step(0) == MOST_SECONDS
    clock.advance(100)
    assert steps.step(0) == MOST_SECONDS
    assert steps.step(1) == 0
    assert steps.step(0) == 0


def test_engines_that_step_together_never_wait() -> None:
    clock = VirtualClock()
    steps = IdleSteps(allowed=False, clock=clock)
    for _ in range(3):
        assert steps.step(0) == 0
        clock.advance(1)


@pytest.mark.parametrize(
    ("text", "seconds"), [("", None), ("0", 0.0), ("0.002", 0.002), ("1", 1.0)]
)
def test_the_spin_of_the_queue_is_read(
    text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert spin_seconds() == seconds


@pytest.mark.parametrize("text", ["2", "-1", "nan", "2ms"])
def test_an_invalid_spin_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE} is '{text}'; use seconds from 0 to 1"):
        spin_seconds()
