"""Batches of a simulation's seeds, and all events of these batches together."""

from __future__ import annotations

import collections

import pytest

from verify.simulation.seeds import Simulation

Happened = collections.Counter[str]


def assert_promises_hold(
    simulation: Simulation, first: int, seeds: int, happened: Happened
) -> None:
    for seed in range(first, first + seeds):
        outcome = simulation.simulate(seed)
        happened += outcome.counts
        assert not outcome.violation, (
            f"{outcome.violation}\nreplay: python -m {simulation.program} --seed {seed} --trace"
        )
    happened["seeds"] += seeds


def assert_all_happened(happened: Happened, seeds: int, wanted: tuple[str, ...]) -> None:
    if happened["seeds"] < seeds:
        pytest.skip("only part of the seeds were run")
    assert not [what for what in wanted if not happened[what]]
