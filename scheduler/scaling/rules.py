"""The number of workers that each rule asks for: pure arithmetic over one role's measurements.

The model is the one of published planners for disaggregated serving:

- Prefill and decode are planned apart, each as (token rate) / (what one worker computes within its
  latency target), as NVIDIA Dynamo's SLA planner does.
- Prefill runs prompts one after the other. Its utilisation is bound by the wait in an M/D/1 queue,
  as in DistServe (Zhong et al., OSDI 2024, section 3.1): with a prompt's own time D and utilisation
  u the mean wait is u D / (2 (1 - u)); its 90th percentile is taken as ln 10 times that, the tail
  being close to exponential.
- Queue, KV occupancy and backlog are average values per worker, as in Kubernetes' HPA: the load
  over the target. They are what the workers hold in all, so they do not depend on the count.
- Latency is feedback for what the model does not know: count times (measured / target), upwards
  only, since the inverse says nothing about how many workers could go.

A queue, a backlog or a latency says that capacity is missing, not how much: while new workers start
it goes on growing. So these three never ask for more than twice the ready workers or those that
were asked for already; the rate may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from kvxfer.instances import Role
from kvxfer.scaling import Demand, Rule
from kvxfer.scheduler.scaling.measurements import RoleMeasurement
from kvxfer.scheduler.scaling.policy import RolePolicy

# Below this utilisation more workers hardly shorten the wait.
_LEAST_UTILISATION: Final = 0.2
_P90_OF_MEAN: Final = math.log(10)
_MOST_GROWTH: Final = 2.0
LATENCY_NAMES: Final = {Role.PREFILL: "TTFT", Role.DECODE: "inter-token latency"}

# Demand, or the reason for silence.
_Answer: TypeAlias = Demand | str
_Rule: TypeAlias = Callable[[Role, RoleMeasurement, RolePolicy, float], _Answer]


def demands(
    role: Role, load: RoleMeasurement, policy: RolePolicy, *, tolerance: float
) -> Iterator[_Answer]:
    """Yields the answer of each rule, in a fixed order: a demand, or why the rule is silent."""
    for rule in _RULES:
        yield rule(role, load, policy, tolerance)


def _rate(role: Role, load: RoleMeasurement, policy: RolePolicy, _: float) -> _Answer:
    if policy.tokens_per_second is None:
        return "rate: tokens_per_second of a worker is not in the policy"
    if load.tokens_per_second is None:
        return "rate: no worker reports its token rate"
    utilisation, why = policy.utilisation, ""
    if role is Role.PREFILL and policy.latency is not None and load.requests_per_second:
        prompt = load.tokens_per_second / load.requests_per_second
        alone = prompt / policy.tokens_per_second
        bound = _md1_utilisation(alone, policy.latency)
        if bound < utilisation:
            utilisation = bound
            why = f" (M/D/1: {alone:.3g} s per prompt, TTFT target {policy.latency:g} s)"
    return _demand(
        Rule.RATE,
        load.tokens_per_second / (policy.tokens_per_second * utilisation),
        f"{load.tokens_per_second:,.0f} tokens/s at {policy.tokens_per_second:,.0f} per worker, "
        f"{utilisation:.0%} of it used{why}",
    )


def _md1_utilisation(alone: float, target: float) -> float:
    """Returns the utilisation at which a prompt's time and the p90 of its wait sum to `target`."""
    slack = max(target / alone - 1, 0.0) * 2 / _P90_OF_MEAN if alone > 0 else math.inf
    return max(1.0 if math.isinf(slack) else slack / (1 + slack), _LEAST_UTILISATION)


def _requests(_: Role, load: RoleMeasurement, policy: RolePolicy, __: float) -> _Answer:
    if policy.requests is None:
        return "requests: not in the policy"
    return _feedback(
        Rule.REQUESTS,
        (load.running + load.waiting) / policy.requests,
        load,
        f"{load.running} requests running and {load.waiting} waiting at {policy.requests:g} "
        "per worker",
    )


def _occupancy(_: Role, load: RoleMeasurement, policy: RolePolicy, __: float) -> _Answer:
    if policy.occupancy is None:
        return "occupancy: not in the policy"
    if not load.blocks:
        return "occupancy: no worker reports its KV blocks"
    per_worker = load.blocks / load.ready
    return _demand(
        Rule.OCCUPANCY,
        load.used_blocks / (per_worker * policy.occupancy),
        f"{load.used_blocks} of {load.blocks} KV blocks in use at {policy.occupancy:.0%} each",
    )


def _backlog(_: Role, load: RoleMeasurement, policy: RolePolicy, __: float) -> _Answer:
    if policy.backlog is None:
        return "backlog: not in the policy"
    return _feedback(
        Rule.BACKLOG,
        load.backlog / policy.backlog,
        load,
        f"{load.backlog} transfers in the backlog at {policy.backlog:g} per worker",
    )


def _latency(role: Role, load: RoleMeasurement, policy: RolePolicy, tolerance: float) -> _Answer:
    if policy.latency is None:
        return "latency: not in the policy"
    if load.latency is None:
        return f"latency: no worker reports its {LATENCY_NAMES[role]}"
    ratio = load.latency / policy.latency
    kept = ratio <= 1 + tolerance
    return _feedback(
        Rule.LATENCY,
        0.0 if kept else load.ready * ratio,
        load,
        f"{LATENCY_NAMES[role]} of {load.latency:.3g} s "
        f"{'keeps' if kept else 'breaks'} its target of {policy.latency:.3g} s",
    )


def _demand(rule: Rule, workers: float, because: str) -> Demand:
    return Demand(
        rule=rule, workers=workers, because=f"{rule}: {workers:.2f} workers for {because}"
    )


def _feedback(rule: Rule, workers: float, load: RoleMeasurement, because: str) -> Demand:
    most = max(load.ready * _MOST_GROWTH, load.current)
    if workers > most:
        doubled = most == load.ready * _MOST_GROWTH
        why = (
            f"at most double the {load.ready} ready"
            if doubled
            else f"{load.current - load.ready} are still to come"
        )
        because += f" (not {workers:.1f}: {why})"
    return _demand(rule, min(workers, most), because)


_RULES: Final[tuple[_Rule, ...]] = (_rate, _requests, _occupancy, _backlog, _latency)
