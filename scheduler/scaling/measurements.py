"""The measurements for a decision: the load of each role, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvxfer.instances import Instance, InstanceState, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMeasurement:
    """The workers of one role together. None means not measured."""

    ready: int = 0
    joining: int = 0
    draining: int = 0
    requested: int | None = None
    """Workers that the backend was asked for; None if there is no backend."""
    running: int = 0
    waiting: int = 0
    backlog: int = 0
    """Transfers that hold a reservation; at decode only those whose prefill is done."""
    blocks: int = 0
    """KV blocks of the ready workers."""
    used_blocks: int = 0
    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    """Tokens of prompts at prefill, of output at decode."""
    latency: float | None = None
    """90th percentile in seconds: TTFT at prefill, inter-token at decode."""

    @property
    def current(self) -> int:
        """Workers that stay unless a decision says otherwise."""
        return self.ready + self.joining if self.requested is None else self.requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A look at the fleet, at `at` seconds on a clock that is not set back."""

    at: float
    prefill: RoleMeasurement
    decode: RoleMeasurement


def measure(
    instances: Iterable[Instance],
    *,
    at: float,
    model: str | None = None,
    requested: dict[Role, int] | None = None,
) -> Measurements:
    """Returns the measurements of a fleet. Workers of role `both` are not scaled and do not count.

    Rates are summed over the ready workers that report them. Latencies are averaged over these by
    their request rates (a percentile of percentiles does not exist; the mean says where most
    requests are). Either side may report TTFT, as decode sees the first token.
    """
    fleet = [i for i in instances if model in (None, i.model) and i.role is not Role.BOTH]
    ready = [i for i in fleet if i.state is InstanceState.READY]
    asked = requested or {}
    latencies = {
        Role.PREFILL: _mean([(i, i.load.ttft_p90) for i in ready]),
        Role.DECODE: _mean([(i, i.load.itl_p90) for i in ready if i.role is Role.DECODE]),
    }
    prefill, decode = (
        _role(
            [i for i in fleet if i.role is role], requested=asked.get(role), latency=latencies[role]
        )
        for role in (Role.PREFILL, Role.DECODE)
    )
    # A transfer is reserved on both sides throughout; what is at prefill is no load of decode.
    in_prefill = prefill.running + prefill.waiting
    decode = replace(decode, backlog=max(decode.backlog - in_prefill, 0))
    return Measurements(at=at, prefill=prefill, decode=decode)


def _role(
    workers: Sequence[Instance], *, requested: int | None, latency: float | None
) -> RoleMeasurement:
    states = [worker.state for worker in workers]
    ready = [worker for worker in workers if worker.state is InstanceState.READY]
    return RoleMeasurement(
        ready=len(ready),
        joining=states.count(InstanceState.JOINING),
        draining=states.count(InstanceState.DRAINING),
        requested=requested,
        running=sum(worker.load.running for worker in ready),
        waiting=sum(worker.load.waiting for worker in ready),
        backlog=sum(worker.reserved.transfers for worker in ready),
        blocks=sum(worker.num_blocks for worker in ready),
        used_blocks=sum(blocks_in_use(worker) for worker in ready),
        requests_per_second=_total([worker.load.requests_per_second for worker in ready]),
        tokens_per_second=_total([worker.load.tokens_per_second for worker in ready]),
        latency=latency,
    )


def blocks_in_use(worker: Instance) -> int:
    """Returns the blocks in use or promised. A reserved block may be in use too, so the two are not
    added up."""
    free = worker.load.free_blocks
    in_use = 0 if free is None else worker.num_blocks - free
    return max(in_use, worker.reserved.blocks)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(reports: Sequence[tuple[Instance, float | None]]) -> float | None:
    known = [
        (i.load.requests_per_second or 0.0, value) for i, value in reports if value is not None
    ]
    if not known:
        return None
    weight = sum(rate for rate, _ in known)
    if weight <= 0:
        return sum(value for _, value in known) / len(known)
    return sum(rate * value for rate, value in known) / weight
