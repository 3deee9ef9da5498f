"""The simulation can fail: each deliberate defect is found, and its seed shows it again."""

from __future__ import annotations

import pytest

from verify.simulation.sessions.defects import DEFECTS
from verify.simulation.sessions.fate import simulate

SEEDS = 600


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str) -> None:
    for seed in range(SEEDS):
        violation = simulate(seed, DEFECTS[name]).violation
        if violation:
            print(f"seed {seed}: {violation}")
            assert simulate(seed, DEFECTS[name]).violation == violation
            assert not simulate(seed).violation
            return
    pytest.fail(f"{name}: nothing wrong in {SEEDS} seeds")
