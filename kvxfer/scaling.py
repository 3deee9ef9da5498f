"""What the autoscaler decides and why: records that its loop, the REST API and the CLI share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvxfer.instances import Role


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


@dataclass(frozen=True, slots=True)
class Demand:
    """A rule that spoke: how many workers the load takes by it, and the sum behind that."""

    rule: Rule
    workers: float
    because: str


@dataclass(frozen=True, slots=True)
class Clip:
    """A bound that changed the count on its way from the demand to what is wanted."""

    bound: Bound
    before: int
    after: int
    because: str


@dataclass(frozen=True, slots=True)
class RoleDecision:
    """The decision for one role."""

    role: Role
    current: int
    """Workers that there are or that were asked for; draining ones do not count."""
    wanted: int
    demands: tuple[Demand, ...]
    """In the order of the rules; the greatest decides. None spoke: the count stays."""
    silent: tuple[str, ...]
    """Why each rule that did not speak could not: what is not measured or not in the policy."""
    clips: tuple[Clip, ...]
    """In the order in which they applied."""

    @property
    def direction(self) -> str:
        """`up`, `down` or `hold`."""
        if self.wanted == self.current:
            return "hold"
        return "up" if self.wanted > self.current else "down"

    @property
    def because(self) -> str:
        """The decision in one line."""
        if not self.demands:
            return "; ".join(["nothing is measured", *(clip.because for clip in self.clips)])
        strongest = max(self.demands, key=lambda demand: demand.workers)
        return "; ".join([strongest.because, *(clip.because for clip in self.clips)])


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """What one control-plane replica would do now."""

    at: float
    """Seconds since the Unix epoch."""
    policy: str
    """The file that the policy was read from, or `default`."""
    model: str | None
    """The model whose workers count; None where all do."""
    backend: str
    """What a decision is applied by: `none`, `processes` or `kubernetes`."""
    leads: bool
    """Whether this replica is the one that applies decisions."""
    observed_seconds: float
    """How long this replica has been observing; it shrinks nothing before it has seen enough."""
    prefill: RoleDecision
    decode: RoleDecision
