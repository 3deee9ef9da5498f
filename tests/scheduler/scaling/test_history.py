"""The history of the autoscaler's decisions."""

from __future__ import annotations

from kvxfer.instances import Role
from kvxfer.scaling import Demand, RoleDecision, Rule, ScalePlan
from kvxfer.scheduler.scaling.history import ScalingHistory


def decision(role: Role, current: int, wanted: int, because: str = "load") -> RoleDecision:
    demands = (Demand(rule=Rule.REQUESTS, workers=wanted, because=because),)
    return RoleDecision.of(role, current, wanted, demands=demands)


def plan(at: float, prefill: RoleDecision, decode: RoleDecision) -> ScalePlan:
    return ScalePlan(
        at=at,
        policy="s.yaml",
        model=None,
        backend="kubernetes",
        leads=True,
        observed_seconds=60.0,
        prefill=prefill,
        decode=decode,
    )


def test_there_is_no_summary_before_the_first_round():
    assert ScalingHistory().summary(5) is None


def test_summary_has_the_last_decisions_and_those_that_changed_a_count():
    history = ScalingHistory()
    stays = decision(Role.DECODE, 1, 1)
    history.note(plan(100, decision(Role.PREFILL, 1, 2), stays))
    history.note(plan(110, decision(Role.PREFILL, 2, 2), decision(Role.DECODE, 1, 3, "queue")))
    history.note(plan(120, decision(Role.PREFILL, 2, 2), decision(Role.DECODE, 3, 3)))
    told = history.summary(125)
    assert told is not None
    assert (told.policy, told.backend, told.leads) == ("s.yaml", "kubernetes", True)
    assert [(s.role, s.current, s.direction, s.age_seconds) for s in told.now] == [
        ("prefill", 2, "hold", 5),
        ("decode", 3, "hold", 5),
    ]
    assert [(s.role, s.current, s.wanted, s.because, s.age_seconds) for s in told.changes] == [
        ("decode", 1, 3, "queue", 15),
        ("prefill", 1, 2, "load", 25),
    ]


def test_repeated_decision_takes_one_place_and_the_oldest_are_dropped():
    history = ScalingHistory()
    same, stays = decision(Role.PREFILL, 1, 2), decision(Role.DECODE, 1, 1)
    for at in range(50):
        history.note(plan(at, same, stays))
    told = history.summary(50)
    assert told is not None
    assert [(s.wanted, s.age_seconds) for s in told.changes] == [(2, 1)]
    for wanted in range(3, 60):
        history.note(plan(50 + wanted, decision(Role.PREFILL, 1, wanted), stays))
    told = history.summary(110)
    assert told is not None
    assert [s.wanted for s in told.changes] == list(range(59, 39, -1))
