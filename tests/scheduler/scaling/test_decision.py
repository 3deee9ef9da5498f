"""The decision as a table: one row per rule and bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer.instances import Role
from kvxfer.scaling import Bound, RoleDecision, Rule
from kvxfer.scheduler.scaling.decision import ScalingState, decide
from kvxfer.scheduler.scaling.measurements import Measurements, RoleMeasurement
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy

POLICY = ScalingPolicy(
    prefill=RolePolicy(
        min=2, max=10, latency=0.5, tokens_per_second=1000, requests=4, occupancy=0.5, backlog=5
    ),
    decode=RolePolicy(min=1, max=10, latency=0.05, requests=10),
)
IDLE = RoleMeasurement(ready=1, blocks=100)


def prefill(load: RoleMeasurement, *, policy: ScalingPolicy = POLICY) -> RoleDecision:
    """Returns the decision on prefill by a replica without a history."""
    decision, _ = decide(Measurements(at=0, prefill=load, decode=IDLE), policy, ScalingState())
    return decision.prefill


class Watch:
    """A series of decisions on one role, as the loop makes them."""

    def __init__(self, policy: ScalingPolicy = POLICY) -> None:
        self.policy = policy
        self.state = ScalingState()
        self.now = 0.0

    def __call__(self, load: RoleMeasurement, *, after: float = 0.0) -> RoleDecision:
        self.now += after
        look = Measurements(at=self.now, prefill=load, decode=IDLE)
        decision, self.state = decide(look, self.policy, self.state)
        return decision.prefill

    def settle(self, load: RoleMeasurement) -> None:
        """Shows the load for the whole stable time."""
        self(load)
        self(load, after=self.policy.stable_down)


def fleet(count: int, **load: float) -> RoleMeasurement:
    return RoleMeasurement(ready=count, blocks=100 * count, **load)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("load", "rule", "workers", "wanted"),
    [
        # 3200 tokens/s, 1000 per worker; 80 % of these may be used.
        (fleet(3, tokens_per_second=3200), Rule.RATE, 4.0, 4),
        # 0.1 s per prompt: 1/(1 + 1/k) with k = (0.5/0.1 - 1) * 2/ln 10 is 77.65 %.
        (fleet(3, tokens_per_second=3200, requests_per_second=32), Rule.RATE, 4.1211, 5),
        # 0.4 s per prompt: k = 0.217, 17.8 %, but no less than 20 %.
        (fleet(8, tokens_per_second=1600, requests_per_second=4), Rule.RATE, 8.0, 8),
        (fleet(3, running=9, waiting=6), Rule.REQUESTS, 3.75, 4),
        (fleet(3, used_blocks=200), Rule.OCCUPANCY, 4.0, 4),
        (fleet(3, backlog=20), Rule.BACKLOG, 4.0, 4),
        (fleet(3, latency=0.8), Rule.LATENCY, 4.8, 5),
        # A queue asks for no more than double; the rate may, in steps of 4.
        (fleet(2, waiting=400), Rule.REQUESTS, 4.0, 4),
        (fleet(2, backlog=400), Rule.BACKLOG, 4.0, 4),
        (fleet(2, latency=40), Rule.LATENCY, 4.0, 4),
        (fleet(2, tokens_per_second=7000), Rule.RATE, 8.75, 6),
    ],
)
def test_each_rule_asks_for_what_its_load_takes(load, rule, workers, wanted):
    decision = prefill(load)
    strongest = max(decision.demands, key=lambda demand: demand.workers)
    assert (strongest.rule, decision.wanted) == (rule, wanted)
    assert strongest.workers == pytest.approx(workers, rel=1e-3)
    assert decision.because.startswith(f"{rule}: ")


def test_latency_that_keeps_its_target_asks_for_nothing():
    decision = prefill(fleet(3, latency=0.52))
    (latency,) = [demand for demand in decision.demands if demand.rule is Rule.LATENCY]
    assert (latency.workers, decision.wanted) == (0, 3)
    assert "keeps its target of 0.5 s" in latency.because


def test_rules_without_a_measurement_say_why():
    silent = prefill(fleet(3)).silent
    assert silent == (
        "rate: no worker reports its token rate",
        "latency: no worker reports its TTFT",
    )
    bare = ScalingPolicy(
        prefill=RolePolicy(requests=None, occupancy=None, backlog=None, latency=None)
    )
    decision = prefill(fleet(3), policy=bare)
    assert (decision.wanted, decision.demands, len(decision.silent)) == (3, (), 5)
    assert decision.because == "nothing is measured"


def test_without_a_ready_worker_the_count_stays():
    decision = prefill(RoleMeasurement(joining=3, draining=1))
    assert (decision.current, decision.wanted, decision.demands) == (3, 3, ())
    assert decision.silent == ("no prefill worker is ready, so nothing is measured",)


def test_requested_workers_count_before_they_have_registered():
    load = replace(fleet(2, tokens_per_second=3200), joining=1, requested=5)
    assert prefill(load).current == 5
    assert prefill(load).wanted == 5, "two more are not asked for a second time"


def test_workers_that_start_slowly_are_kept_while_a_queue_waits_for_them():
    watch = Watch()
    starting = replace(fleet(1, waiting=400), requested=6)
    watch.settle(starting)
    later = watch(starting, after=3600)
    assert (later.wanted, later.clips) == (6, ())
    assert "(not 100.0: 5 are still to come)" in later.because
    watch(replace(starting, waiting=0), after=10)
    assert watch(replace(starting, waiting=0), after=300).wanted == 5, "without a queue, one goes"


def test_draining_workers_do_not_count():
    assert prefill(replace(fleet(2), draining=4)).current == 2


@pytest.mark.parametrize(
    ("load", "bound", "wanted"),
    [
        (fleet(4, tokens_per_second=3300), Bound.TOLERANCE, 4),
        (fleet(3, tokens_per_second=7900), Bound.STEP, 7),
        (fleet(9, tokens_per_second=50_000), Bound.MAX, 10),
        (fleet(1), Bound.MIN, 2),
        (fleet(12), Bound.MAX, 10),
    ],
)
def test_bounds_that_clip_at_once(load, bound, wanted):
    decision = prefill(load)
    assert decision.wanted == wanted
    assert decision.clips[-1].bound is bound
    assert decision.clips[-1].after == wanted
    assert decision.because.endswith(decision.clips[-1].because)


def test_fewer_only_after_the_whole_stable_time():
    watch = Watch()
    assert watch(fleet(5)).clips[0].bound is Bound.STABILISATION
    assert watch(fleet(5), after=299).wanted == 5
    assert watch(fleet(5), after=1).wanted == 4, "one step after 300 s"


def test_a_peak_within_the_stable_time_keeps_the_workers():
    watch = Watch()
    watch(fleet(5))
    watch(fleet(5, tokens_per_second=3900), after=200)
    watch(fleet(5), after=10)
    held = watch(fleet(5), after=200)
    assert (held.wanted, held.clips[0].bound) == (5, Bound.STABILISATION)
    assert "up to 5 were asked for in the last 300 s" in held.because
    assert watch(fleet(5), after=101).wanted == 4


def test_more_workers_wait_for_their_cooldown():
    watch = Watch()
    assert watch(fleet(2, tokens_per_second=3900)).wanted == 5
    again = watch(replace(fleet(2, tokens_per_second=7000), requested=5), after=29)
    assert (again.wanted, again.clips[-1].bound) == (5, Bound.COOLDOWN)
    assert watch(replace(fleet(2, tokens_per_second=7000), requested=5), after=1).wanted == 9


def test_fewer_workers_wait_for_their_cooldown():
    watch = Watch()
    watch.settle(fleet(6))
    again = watch(fleet(5), after=59)
    assert (again.wanted, again.clips[-1].bound) == (5, Bound.COOLDOWN)
    assert watch(fleet(5), after=1).wanted == 4


def test_a_step_down_that_broke_the_latency_is_not_repeated_at_that_load():
    load = {"tokens_per_second": 1000.0}
    watch = Watch()
    watch.settle(fleet(5, **load))
    assert watch(fleet(4, latency=0.9, **load), after=60).wanted == 8
    watch(fleet(8, **load), after=10)
    counts = [8]
    for _ in range(100):
        counts.append(watch(fleet(counts[-1], **load), after=30).wanted)
    assert counts[-1] == 5, "not 4 again"
    held = watch(fleet(5, **load), after=10)
    assert held.clips[-1].bound is Bound.REGRET
    assert watch(fleet(5, tokens_per_second=900), after=10).wanted == 4, "at a lower load it is"


def test_a_step_up_for_more_load_is_no_regret():
    watch = Watch()
    watch.settle(fleet(5, tokens_per_second=1000))
    watch(fleet(4, tokens_per_second=1200, latency=0.9), after=60)
    assert watch.state.prefill.regret is None


def test_regret_ends_with_its_memory():
    load = {"tokens_per_second": 1000.0}
    watch = Watch()
    watch.settle(fleet(5, **load))
    watch(fleet(4, latency=0.9, **load), after=60)
    watch(fleet(5, **load), after=1000)
    held = watch(fleet(5, **load), after=POLICY.latency_memory - 1001)
    assert (held.wanted, held.clips[-1].bound) == (5, Bound.REGRET)
    assert watch(fleet(5, **load), after=1).wanted == 4


def test_roles_are_decided_independently():
    look = Measurements(
        at=0, prefill=fleet(3, tokens_per_second=3900), decode=fleet(3, running=25, waiting=20)
    )
    decision, _ = decide(look, POLICY, ScalingState())
    assert (decision.prefill.wanted, decision.decode.wanted) == (5, 5)
    assert (decision.prefill.role, decision.decode.role) == (Role.PREFILL, Role.DECODE)
