"""What the autoscaler decides and why: records that its loop, the REST API and the CLI share."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from kvxfer.instances import Role, UnixTime
from kvxfer.record import Record

Direction: TypeAlias = Literal["up", "down", "hold"]

_Because: TypeAlias = Annotated[
    str,
    Meta(examples=["rate: 3.86 workers for 60,000 tokens/s at 20,000 per worker, 78% of it used"]),
]


class Rule(StrEnum):
    """What can ask for workers."""

    RATE = "rate"
    REQUESTS = "requests"
    OCCUPANCY = "occupancy"
    BACKLOG = "backlog"
    LATENCY = "latency"


class Bound(StrEnum):
    """What can keep the count from what the rules ask for."""

    TOLERANCE = "tolerance"
    COOLDOWN = "cooldown"
    STABILISATION = "stabilisation"
    REGRET = "regret"
    STEP = "step"
    MIN = "min"
    MAX = "max"


class Demand(Record, frozen=True, kw_only=True):
    """A rule that spoke: how many workers the load takes by it, and the sum behind that."""

    rule: Rule
    workers: float
    because: _Because


class Clip(Record, frozen=True, kw_only=True):
    """A bound that changed the count on its way from the demand to what is wanted."""

    bound: Bound
    before: int
    after: int
    because: _Because


class RoleDecision(Record, frozen=True, kw_only=True):
    """The decision for one role."""

    role: Role
    current: int
    """Workers that there are or that were asked for; draining ones do not count."""
    wanted: int
    direction: Direction
    because: _Because
    """The decision in one line."""
    demands: tuple[Demand, ...]
    """In the order of the rules; the greatest decides. None spoke: the count stays."""
    silent: tuple[Annotated[str, Meta(examples=["latency: no worker reports its TTFT"])], ...]
    """Why each rule that did not speak could not: what is not measured or not in the policy."""
    clips: tuple[Clip, ...]
    """In the order in which they applied."""

    @classmethod
    def of(
        cls,
        role: Role,
        current: int,
        wanted: int,
        *,
        demands: Iterable[Demand] = (),
        silent: Iterable[str] = (),
        clips: Iterable[Clip] = (),
    ) -> RoleDecision:
        """The decision that follows from what spoke."""
        demands, clips = tuple(demands), tuple(clips)
        strongest = max(demands, key=lambda demand: demand.workers, default=None)
        first = "nothing is measured" if strongest is None else strongest.because
        return cls(
            role=role,
            current=current,
            wanted=wanted,
            direction=_direction(current, wanted),
            because="; ".join([first, *(clip.because for clip in clips)]),
            demands=demands,
            silent=tuple(silent),
            clips=clips,
        )


class ScalePlan(Record, frozen=True, kw_only=True):
    """What one control-plane replica would do now. Nothing is applied by asking."""

    at: UnixTime
    """Seconds since the Unix epoch."""
    policy: Annotated[str, Meta(examples=["scaling.yaml"])]
    """The file that the policy was read from, or `default`."""
    model: Annotated[str | None, Meta(examples=[None])]
    """The model whose workers count; None where all do."""
    backend: Annotated[str, Meta(examples=["kubernetes"])]
    """What a decision is applied by: `none`, `processes` or `kubernetes`."""
    leads: bool
    """Whether this replica is the one that applies decisions."""
    observed_seconds: float
    """How long this replica has been observing; it shrinks nothing before it has seen enough."""
    prefill: RoleDecision
    decode: RoleDecision


def _direction(current: int, wanted: int) -> Direction:
    if wanted == current:
        return "hold"
    return "up" if wanted > current else "down"
