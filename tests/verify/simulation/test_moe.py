"""Views of MoE groups on virtual time: every promise holds, and each deliberate defect is found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.verify.simulation.seeds import Happened, assert_all_happened, assert_promises_hold
from verify.simulation.moe.__main__ import SIMULATION
from verify.simulation.moe.defects import DEFECTS
from verify.simulation.moe.fate import FAULTS, simulate

SEEDS = 500
BATCH = 125
_REACHED = (
    *FAULTS, "views", "newcomers admitted", "most survived", "asked",
    "steps refused", "steps left out",
    "dispatches with missing ranks", "combines with missing ranks",
    "ended: rank-excluded", "ended: moe-group-lost",
)  # fmt: skip


@pytest.fixture(scope="module")
def happened() -> Iterator[Happened]:
    """The events of all batches together."""
    counts = Happened()
    yield counts
    print(dict(sorted(counts.items())))


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_promise_holds_in_every_seed(first: int, happened: Happened) -> None:
    assert_promises_hold(SIMULATION, first, BATCH, happened)


def test_everything_that_can_happen_did(happened: Happened) -> None:
    assert_all_happened(happened, SEEDS, _REACHED)


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


@pytest.mark.parametrize("seed", range(20, 25))
def test_the_same_seed_gives_the_same_events(seed: int) -> None:
    first, again = simulate(seed, trace=True), simulate(seed)
    assert first.fingerprint == again.fingerprint
    assert len(first.trace) > 0
