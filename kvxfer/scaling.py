"""Records of the autoscaler's decisions, shared by its loop, the REST API and the CLI."""

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
    """The rules that can ask for workers."""

    RATE = "rate"
    REQUESTS = "requests"
    OCCUPANCY = "occupancy"
    BACKLOG = "backlog"
    LATENCY = "latency"


class Bound(StrEnum):
    """The bounds that can change the count that the rules ask for."""

    TOLERANCE = "tolerance"
    COOLDOWN = "cooldown"
    STABILISATION = "stabilisation"
    REGRET = "regret"
    STEP = "step"
    MIN = "min"
    MAX = "max"


class Demand(Record, frozen=True, kw_only=True):
    """A rule's demand: the number of workers that the load needs by this rule, and the
    calculation."""

    rule: Rule
    workers: float
    because: _Because


class Clip(Record, frozen=True, kw_only=True):
    """A bound that changed the count between the demand and the wanted count."""

    bound: Bound
    before: int
    after: int
    because: _Because


class RoleDecision(Record, frozen=True, kw_only=True):
    """The decision for one role."""

    role: Role
    current: int
    """Workers that exist or were requested; draining ones do not count."""
    wanted: int
    direction: Direction
    because: _Because
    """The decision in one line."""
    demands: tuple[Demand, ...]
    """Demands in the order of the rules. The greatest decides; without any, the count stays."""
    silent: tuple[Annotated[str, Meta(examples=["latency: no worker reports its TTFT"])], ...]
    """Reason of each rule that makes no demand: a value that is not measured or not in the
    policy."""
    clips: tuple[Clip, ...]
    """Clips in the order in which they applied."""

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
        """Returns the decision that follows from the demands and clips."""
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
    """The decision that one control-plane replica would make now. Asking for it applies nothing."""

    at: UnixTime
    """Seconds since the Unix epoch."""
    policy: Annotated[str, Meta(examples=["scaling.yaml"])]
    """File of the policy, or `default`."""
    model: Annotated[str | None, Meta(examples=[None])]
    """Model whose workers count; None if all do."""
    backend: Annotated[str, Meta(examples=["kubernetes"])]
    """Backend that applies decisions: `none`, `processes` or `kubernetes`."""
    leads: bool
    """Whether this replica applies its decisions."""
    observed_seconds: float
    """Seconds for which this replica has observed the load. It removes no worker until it has
    observed long enough."""
    prefill: RoleDecision
    decode: RoleDecision


def _direction(current: int, wanted: int) -> Direction:
    if wanted == current:
        return "hold"
    return "up" if wanted > current else "down"
