"""Properties of every decision, with any measurements and any policy."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.scheduler.scaling.decision import ScalingState, decide
from kvxfer.scheduler.scaling.measurements import Measurements, RoleMeasurement
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.replay import replay
from kvxfer.scheduler.scaling.trace import Load, Trace
from kvxfer.scheduler.scaling.worker_model import WorkerModel

maybe = st.none


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


@st.composite
def role_policies(draw: st.DrawFn) -> RolePolicy:
    lowest = draw(st.integers(1, 8))
    return RolePolicy(
        min=lowest,
        max=draw(st.integers(lowest, 40)),
        latency=draw(maybe() | numbers(0.01, 5)),
        tokens_per_second=draw(maybe() | numbers(1, 1e5)),
        utilisation=draw(numbers(0.1, 1)),
        requests=draw(maybe() | numbers(0.5, 64)),
        occupancy=draw(maybe() | numbers(0.1, 1)),
        backlog=draw(maybe() | numbers(0.5, 64)),
    )


@st.composite
def policies(draw: st.DrawFn) -> ScalingPolicy:
    return ScalingPolicy(
        tolerance=draw(numbers(0, 0.5)),
        step_up=draw(st.integers(1, 10)),
        step_down=draw(st.integers(1, 10)),
        cooldown_up=draw(numbers(0, 100)),
        cooldown_down=draw(numbers(0, 100)),
        stable_down=draw(numbers(0, 300)),
        latency_memory=draw(numbers(0, 1000)),
        prefill=draw(role_policies()),
        decode=draw(role_policies()),
    )


@st.composite
def loads(draw: st.DrawFn) -> RoleMeasurement:
    ready = draw(st.integers(0, 40))
    blocks = ready * draw(st.integers(0, 1000))
    return RoleMeasurement(
        ready=ready,
        joining=draw(st.integers(0, 10)),
        draining=draw(st.integers(0, 10)),
        requested=draw(maybe() | st.integers(0, 60)),
        running=draw(st.integers(0, 10_000)),
        waiting=draw(st.integers(0, 10_000)),
        backlog=draw(st.integers(0, 10_000)),
        blocks=blocks,
        used_blocks=draw(st.integers(0, blocks)),
        requests_per_second=draw(maybe() | numbers(0.01, 1e4)),
        tokens_per_second=draw(maybe() | numbers(0, 1e7)),
        latency=draw(maybe() | numbers(0, 1000)),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Measurements]:
    """Draws measurements of a fleet, in order of time."""
    now = 0.0
    looks = []
    for _ in range(draw(st.integers(1, 12))):
        now += draw(numbers(0, 400))
        looks.append(Measurements(at=now, prefill=draw(loads()), decode=draw(loads())))
    return looks


def run(looks: list[Measurements], policy: ScalingPolicy) -> ScalingState:
    state = ScalingState()
    for look in looks:
        _, state = decide(look, policy, state)
    return state


@given(histories(), policies())
def test_bounds_and_steps_are_kept(looks, policy):
    state = ScalingState()
    for look in looks:
        decision, state = decide(look, policy, state)
        for role, own in ((decision.prefill, policy.prefill), (decision.decode, policy.decode)):
            assert own.min <= role.wanted <= own.max
            if own.min <= role.current <= own.max:
                assert -policy.step_down <= role.wanted - role.current <= policy.step_up
            for before, after in zip(role.clips, role.clips[1:], strict=False):
                assert before.after == after.before, "each clip goes on from the one before"
            if role.clips:
                assert role.clips[-1].after == role.wanted


@given(histories(), policies())
def test_same_measurements_same_decision(looks, policy):
    state = run(looks[:-1], policy)
    assert decide(looks[-1], policy, state) == decide(looks[-1], policy, state)
    assert run(looks, policy) == run(looks, policy)


def more(load: RoleMeasurement, extra: int, factor: float) -> RoleMeasurement:
    """Returns the load of the same workers with at least as much to do."""

    def scaled(value: float | None) -> float | None:
        return None if value is None else value * factor

    return replace(
        load,
        running=load.running + extra,
        waiting=load.waiting + extra,
        backlog=load.backlog + extra,
        used_blocks=min(load.used_blocks + extra, load.blocks),
        requests_per_second=scaled(load.requests_per_second),
        tokens_per_second=scaled(load.tokens_per_second),
        latency=scaled(load.latency),
    )


@given(histories(), policies(), st.integers(0, 5000), numbers(1, 20))
def test_more_load_never_wants_fewer_workers(looks, policy, extra, factor):
    state, look = run(looks[:-1], policy), looks[-1]
    less, _ = decide(look, policy, state)
    loaded = replace(look, prefill=more(look.prefill, extra, factor))
    most, _ = decide(loaded, policy, state)
    assert most.prefill.wanted >= less.prefill.wanted
    assert most.decode == less.decode, "the roles do not touch each other"


@given(loads(), policies(), numbers(1, 60))
def test_a_constant_load_moves_the_count_one_way_and_then_not_at_all(load, policy, interval):
    """The measured load does not depend on the count."""
    load = replace(load, ready=max(load.ready, 1), joining=0, requested=None)
    state, counts = ScalingState(), [load.ready]
    for step in range(150):
        at = step * interval
        # Occupancy is a part of a pool that grows with the count.
        now = replace(
            load,
            ready=counts[-1],
            blocks=counts[-1] * 1000,
            used_blocks=min(load.used_blocks, 1000),
            latency=None,
        )
        decision, state = decide(Measurements(at=at, prefill=now, decode=now), policy, state)
        counts.append(decision.prefill.wanted)
    if not policy.prefill.min <= counts[0] <= policy.prefill.max:
        counts = counts[1:]
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert all(step >= 0 for step in steps) or all(step <= 0 for step in steps), counts


@settings(max_examples=30)
@given(numbers(0.5, 30), st.integers(200, 6000), st.integers(10, 600))
def test_on_a_constant_load_the_whole_loop_comes_to_rest(rate, prompt, output):
    """Fewer workers are slower, so latency feeds back into the count."""
    policy = ScalingPolicy(
        stable_down=120,
        cooldown_down=30,
        latency_memory=1e9,
        prefill=RolePolicy(max=60, latency=0.6),
        decode=RolePolicy(max=60, latency=0.03, requests=64),
    )
    load = Load(rate, prompt, output)
    result = replay(Trace("constant", (0, 7200), (load, load)), policy, WorkerModel())
    last_hour = [step for step in result.steps if step.at > 5400]
    for role in ("prefill", "decode"):
        counts = {getattr(step.decision, role).wanted for step in last_hour}
        assert len(counts) == 1, f"{role} goes on changing: {sorted(counts)}"
