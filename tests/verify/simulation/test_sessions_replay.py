"""A seed is a schedule: the same seed gives the same events, to the last one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from verify.simulation.sessions.fate import simulate


@pytest.mark.parametrize("seed", range(40, 60))
def test_the_same_seed_gives_the_same_events(seed: int) -> None:
    first, again = simulate(seed, trace=True), simulate(seed, trace=True)
    assert first.trace == again.trace
    assert first.fingerprint == again.fingerprint


def test_a_trace_changes_nothing() -> None:
    assert simulate(7).fingerprint == simulate(7, trace=True).fingerprint


@pytest.mark.native
def test_another_process_sees_the_same_events() -> None:
    """Hashes and addresses differ between processes."""
    command = [sys.executable, "-m", "verify.simulation.sessions", "--seed", "7", "--trace"]
    prints = [
        subprocess.run(
            command, env={"PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    ]
    assert prints[0] == prints[1]
    assert len(prints[0].splitlines()) > 100


def test_another_seed_gives_other_events() -> None:
    assert simulate(1, trace=True).trace != simulate(2, trace=True).trace
