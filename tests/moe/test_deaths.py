"""Ranks that are killed or frozen within a step: what the other ranks get, and how they go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from tests.moe.conftest import WHOLE, Drive
from tests.moe.scenario import Scenario

pytestmark = pytest.mark.realtime

PHASES: Final = ("before dispatch", "after dispatch", "after arrival", "after answer")
FABRICS: Final = ("local", "tcp")
CASES: Final = (
    [(phase, fabric) for phase in PHASES for fabric in FABRICS]
    if WHOLE
    else list(zip(PHASES, FABRICS * 2, strict=True))
)
FAULTY: Final = Scenario(ranks=4, experts=12, top_k=3, copies=2, victim=2)


@pytest.mark.parametrize(("phase", "fabric"), CASES)
def test_a_killed_rank_costs_its_part_of_a_step(drive: Drive, phase: Any, fabric: Any) -> None:
    """Replicas answer for all experts from the next step on, and a newcomer takes the place."""
    base = replace(FAULTY, phase=phase, fabric=fabric)
    drive(base, replace(base, victim=0, rejoin=True, layout="tokens", overlap=True))


@pytest.mark.parametrize(("phase", "fabric"), CASES)
def test_a_frozen_rank_is_excluded(drive: Drive, phase: Any, fabric: Any) -> None:
    """The rank learns of it when it runs again; a newcomer may take its place."""
    base = replace(FAULTY, fault="freeze", phase=phase, fabric=fabric)
    drive(base, replace(base, victim=0, rejoin=True, layout="padded"))


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_a_step_is_refused_while_a_rank_is_lost(drive: Drive, fabric: str, fault: Any) -> None:
    """The other ranks agree on both at once, or on one after the other."""
    base = replace(FAULTY, fault=fault, fabric=fabric, refuser=1, refused_steps=(5, 6))
    drive(
        base,
        replace(base, phase="after dispatch", refuser=3, overlap=True, rejoin=True),
        replace(base, victim=0, phase="after answer", fault_step=4, rejoin=True),
    )


def test_experts_without_a_replica_are_missing(drive: Drive, fabric: str) -> None:
    drive(replace(FAULTY, copies=1, fabric=fabric, routing="holes"))


def test_one_of_two_ranks_goes_on_alone(drive: Drive, fabric: str) -> None:
    base = replace(FAULTY, ranks=2, victim=1, fabric=fabric)
    drive(base, replace(base, victim=0, rejoin=True), replace(base, victim=0, fault="freeze"))


def test_a_group_of_too_few_ranks_ends(drive: Drive, fabric: str) -> None:
    drive(replace(FAULTY, min_ranks=4, fabric=fabric))


@pytest.mark.skipif(not WHOLE, reason="make test SUITE=moe")
def test_eight_ranks(drive: Drive, fabric: str) -> None:
    base = replace(FAULTY, ranks=8, experts=32, victim=5, rejoin=True, fabric=fabric)
    drive(*[replace(base, phase=phase, overlap=True) for phase in PHASES])
