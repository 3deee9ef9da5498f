"""The decision: measurements, policy and earlier decisions go in, wanted counts come out.

A pure function of its arguments: no clock, no I/O. Its memory is a value that comes out with each
decision and goes into the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kvxfer.instances import Role
from kvxfer.scaling import Bound, Clip, Demand, RoleDecision, Rule
from kvxfer.scheduler.scaling.measurements import Measurements, RoleMeasurement
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.rules import demands


@dataclass(frozen=True, slots=True)
class StepDown:
    """The last decision that took workers away: from how many, at which load."""

    at: float
    before: int
    load: float | None


@dataclass(frozen=True, slots=True)
class Regret:
    """A step down that had to be taken back: not below `count` again at this load."""

    at: float
    count: int
    load: float | None


@dataclass(frozen=True, slots=True)
class RoleState:
    """The memory of the decisions of one role. Times are those of the measurements."""

    since: float | None = None
    """The time of the first measurement."""
    asked: tuple[tuple[float, int], ...] = ()
    """The counts that the rules asked for, as far back as the stabilisation looks: a new entry per
    change, which holds until the next one."""
    up_at: float | None = None
    changed_at: float | None = None
    step_down: StepDown | None = None
    regret: Regret | None = None


@dataclass(frozen=True, slots=True)
class ScalingState:
    prefill: RoleState = field(default_factory=RoleState)
    decode: RoleState = field(default_factory=RoleState)


@dataclass(frozen=True, slots=True)
class Decision:
    prefill: RoleDecision
    decode: RoleDecision


def decide(
    measurements: Measurements, policy: ScalingPolicy, state: ScalingState
) -> tuple[Decision, ScalingState]:
    """Returns the wanted counts with their reasons, and the state for the next decision.

    The largest demand of the rules counts. More workers come at once, in steps; fewer only after
    the demand was lower for `stable_down`. `min` and `max` hold before everything else. The state
    assumes that the decision is carried out.
    """
    at = measurements.at
    prefill, prefill_state = _decide_role(
        Role.PREFILL, measurements.prefill, at, policy, policy.prefill, state.prefill
    )
    decode, decode_state = _decide_role(
        Role.DECODE, measurements.decode, at, policy, policy.decode, state.decode
    )
    return Decision(prefill, decode), ScalingState(prefill_state, decode_state)


def _decide_role(
    role: Role,
    load: RoleMeasurement,
    at: float,
    policy: ScalingPolicy,
    own: RolePolicy,
    state: RoleState,
) -> tuple[RoleDecision, RoleState]:
    current = load.current
    spoken: list[Demand] = []
    silent: list[str] = []
    if load.ready == 0:
        silent.append(f"no {role} worker is ready, so nothing is measured")
    else:
        for answer in demands(role, load, own, tolerance=policy.tolerance):
            if isinstance(answer, str):
                silent.append(answer)
            else:
                spoken.append(answer)
    workers = max((demand.workers for demand in spoken), default=float(current))

    asked = _whole(workers)
    state = _remember(state, at, asked, policy.stable_down)
    clips: list[Clip] = []
    wanted = asked
    if wanted > current:
        wanted = _upwards(wanted, current, workers, at, policy, state, clips)
    elif wanted < current:
        wanted = _downwards(role, wanted, current, load, at, policy, state, clips)
    wanted = _within(wanted, own, clips)

    decision = RoleDecision.of(role, current, wanted, demands=spoken, silent=silent, clips=clips)
    return decision, _after(state, decision, load, at, policy)


def _whole(workers: float) -> int:
    # A sum that is a whole number but for rounding is that number.
    return math.ceil(min(workers, 1e9) - 1e-9)


def _upwards(
    wanted: int,
    current: int,
    workers: float,
    at: float,
    policy: ScalingPolicy,
    state: RoleState,
    clips: list[Clip],
) -> int:
    if workers <= current * (1 + policy.tolerance):
        why = f"{workers:.3g} workers are within {policy.tolerance:.0%} of {current}"
        return _clip(clips, Bound.TOLERANCE, wanted, current, why)
    if state.up_at is not None and at - state.up_at < policy.cooldown_up:
        why = (
            f"workers were added {at - state.up_at:.0f} s ago, "
            f"and the cooldown is {policy.cooldown_up:g} s"
        )
        return _clip(clips, Bound.COOLDOWN, wanted, current, why)
    why = f"at most {policy.step_up} more at once"
    return _clip(clips, Bound.STEP, wanted, min(wanted, current + policy.step_up), why)


def _downwards(
    role: Role,
    wanted: int,
    current: int,
    load: RoleMeasurement,
    at: float,
    policy: ScalingPolicy,
    state: RoleState,
    clips: list[Clip],
) -> int:
    seen = at - (at if state.since is None else state.since)
    if seen < policy.stable_down:
        why = f"the load is known for {seen:.0f} s, and a step down needs {policy.stable_down:g} s"
        return _clip(clips, Bound.STABILISATION, wanted, current, why)
    most = max(count for _, count in state.asked)
    why = f"up to {most} were asked for in the last {policy.stable_down:g} s"
    wanted = _clip(clips, Bound.STABILISATION, wanted, min(most, current), why)
    if wanted < current and (regret := _live_regret(state, role, load, at, policy)) is not None:
        why = f"fewer than {regret.count} were not enough {at - regret.at:.0f} s ago at this load"
        wanted = _clip(clips, Bound.REGRET, wanted, min(max(wanted, regret.count), current), why)
    if wanted == current:
        return wanted
    if state.changed_at is not None and at - state.changed_at < policy.cooldown_down:
        why = (
            f"the count changed {at - state.changed_at:.0f} s ago, "
            f"and the cooldown is {policy.cooldown_down:g} s"
        )
        return _clip(clips, Bound.COOLDOWN, wanted, current, why)
    why = f"at most {policy.step_down} fewer at once"
    return _clip(clips, Bound.STEP, wanted, max(wanted, current - policy.step_down), why)


def _within(wanted: int, own: RolePolicy, clips: list[Clip]) -> int:
    wanted = _clip(clips, Bound.MIN, wanted, max(wanted, own.min), f"min is {own.min}")
    return _clip(clips, Bound.MAX, wanted, min(wanted, own.max), f"max is {own.max}")


def _clip(clips: list[Clip], bound: Bound, before: int, after: int, why: str) -> int:
    if after != before:
        because = f"{bound}: {after} instead of {before}, {why}"
        clips.append(Clip(bound=bound, before=before, after=after, because=because))
    return after


# --- state -----------------------------------------------------------------------------------


def _remember(state: RoleState, at: float, asked: int, seconds: float) -> RoleState:
    """Returns the state with this demand in it and without those that no longer matter."""
    entries = state.asked
    if not entries or entries[-1][1] != asked:
        entries = (*entries, (at, asked))
    # An entry holds until the next one begins.
    first = next(
        (i for i, (until, _) in enumerate(entries[1:]) if until > at - seconds), len(entries) - 1
    )
    return replace(state, since=at if state.since is None else state.since, asked=entries[first:])


def _live_regret(
    state: RoleState, role: Role, load: RoleMeasurement, at: float, policy: ScalingPolicy
) -> Regret | None:
    regret = state.regret
    if regret is None or at - regret.at >= policy.latency_memory:
        return None
    now = _arrivals(role, load)
    if now is None or regret.load is None or now >= regret.load * (1 - policy.tolerance):
        return regret
    return None


def _after(
    state: RoleState,
    decision: RoleDecision,
    load: RoleMeasurement,
    at: float,
    policy: ScalingPolicy,
) -> RoleState:
    """Returns the state once the decision is carried out."""
    if decision.direction == "hold":
        return state
    if decision.direction == "down":
        step = StepDown(at, decision.current, _arrivals(decision.role, load))
        return replace(state, changed_at=at, step_down=step)
    return replace(
        state,
        up_at=at,
        changed_at=at,
        step_down=None,
        regret=_regret(state, decision, load, at, policy),
    )


def _regret(
    state: RoleState,
    decision: RoleDecision,
    load: RoleMeasurement,
    at: float,
    policy: ScalingPolicy,
) -> Regret | None:
    """Returns the regret after a step up: a new one if it takes back the last step down.

    The token rate is known beforehand, so a step up that it asks for is caused by the load.
    """
    step, before = state.step_down, _live_regret(state, decision.role, load, at, policy)
    strongest = max(decision.demands, key=lambda demand: demand.workers, default=None)
    if step is None or strongest is None or strongest.rule is Rule.RATE:
        return state.regret
    now = _arrivals(decision.role, load)
    if now is None or step.load is None:
        blamed = at - step.at <= policy.stable_down
    else:
        blamed = now <= step.load * (1 + policy.tolerance)
    if not blamed:
        return state.regret
    return Regret(at, max(step.before, before.count if before else 0), step.load)


def _arrivals(role: Role, load: RoleMeasurement) -> float | None:
    """Returns the rate of arrivals, which does not depend on the count of workers."""
    if role is Role.PREFILL and load.tokens_per_second is not None:
        return load.tokens_per_second
    return load.requests_per_second
