"""The replay of a load trace: its decisions, on virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.scheduler.scaling.decision import Decision, ScalingState, decide
from kvxfer.scheduler.scaling.paper_fleet import PaperFleet
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.trace import Trace
from kvxfer.scheduler.scaling.worker_model import WorkerModel

_STEP: Final = 1.0


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """One decision, and what it was made from."""

    at: float
    requests_per_second: float
    ttft: float
    itl: float
    decision: Decision

    @property
    def changes(self) -> bool:
        return any(
            role.direction != "hold" for role in (self.decision.prefill, self.decision.decode)
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """All decisions of a trace, and their totals. A part without a target or requests is None."""

    steps: tuple[ReplayStep, ...]
    requests: float
    within_ttft: float | None
    """The part of the requests that came while the TTFT target was kept."""
    within_itl: float | None
    prefill_worker_hours: float
    decode_worker_hours: float


def replay(trace: Trace, policy: ScalingPolicy, model: WorkerModel) -> Replay:
    """Runs the whole trace. The fleet begins with `min` workers, ready and idle."""
    fleet = PaperFleet(model, prefill=policy.prefill.min, decode=policy.decode.min)
    state = ScalingState()
    steps: list[ReplayStep] = []
    requests = kept_ttft = kept_itl = 0.0
    prefill_seconds = decode_seconds = 0.0
    now, next_decision = 0.0, 0.0
    prefill, decode = policy.prefill.min, policy.decode.min
    while now < trace.end:
        load = trace.at(now)
        now += _STEP
        fleet.advance(now, load)
        requests += load.requests_per_second
        if policy.prefill.latency is None or fleet.ttft <= policy.prefill.latency:
            kept_ttft += load.requests_per_second
        if policy.decode.latency is None or fleet.itl <= policy.decode.latency:
            kept_itl += load.requests_per_second
        prefill_seconds += prefill
        decode_seconds += decode
        if now < next_decision:
            continue
        next_decision = now + policy.interval
        decision, state = decide(fleet.measurements(now), policy, state)
        prefill, decode = decision.prefill.wanted, decision.decode.wanted
        fleet.resize(prefill, decode, now=now)
        steps.append(ReplayStep(now, load.requests_per_second, fleet.ttft, fleet.itl, decision))
    return Replay(
        steps=tuple(steps),
        requests=requests,
        within_ttft=_part(kept_ttft, requests, policy.prefill.latency),
        within_itl=_part(kept_itl, requests, policy.decode.latency),
        prefill_worker_hours=prefill_seconds / 3600,
        decode_worker_hours=decode_seconds / 3600,
    )


def _part(kept: float, requests: float, target: float | None) -> float | None:
    if target is None or requests == 0:
        return None
    return kept / requests
