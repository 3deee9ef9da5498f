"""Views of MoE groups on virtual time: every promise holds, and each deliberate defect is found."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest

from verify.moe.defects import DEFECTS
from verify.moe.fate import FAULTS, simulate

SEEDS = 500
BATCH = 125
_REACHED = (
    *FAULTS, "views", "newcomers admitted", "most survived", "asked",
    "dispatches with missing ranks", "combines with missing ranks",
    "ended: rank-excluded", "ended: moe-group-lost",
)  # fmt: skip


@pytest.fixture(scope="module")
def happened() -> Iterator[collections.Counter[str]]:
    """What happened in all batches together."""
    counts: collections.Counter[str] = collections.Counter()
    yield counts
    print(dict(sorted(counts.items())))


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_whatever_happens_every_promise_holds(
    first: int, happened: collections.Counter[str]
) -> None:
    for seed in range(first, first + BATCH):
        outcome = simulate(seed)
        happened += outcome.counts
        assert not outcome.violation, (
            f"{outcome.violation}\nreplay: python -m verify.moe --seed {seed} --trace"
        )
    happened["seeds"] += BATCH


def test_everything_that_can_happen_did(happened: collections.Counter[str]) -> None:
    if happened["seeds"] < SEEDS:
        pytest.skip("only part of the seeds were run")
    assert not [what for what in _REACHED if not happened[what]]


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
