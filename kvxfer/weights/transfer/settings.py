"""Deadlines of a weight update, and whether it is checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds
from kvxfer.weights.plan.settings import ScheduleSettings

Policy: TypeAlias = Literal["drain", "abort", "keep"]
"""They end first; they are aborted, and may be sent again; they go on with the new weights."""

Mode: TypeAlias = Literal["atomic", "wave"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Of the coordinator, which tells the members. Raises InvalidArgument that names the member and
    its bounds."""

    mode: Mode = "atomic"
    """"atomic": inference ranks stage everything, and serve the version before meanwhile. "wave":
    they stage as much as their arenas take and apply it, until they have everything. An instance is
    out of service from its first wave to its last."""
    digests: bool = True
    """Whether all bytes are checked where they have arrived."""
    ready_seconds: Seconds = 60.0
    """From the first training rank's push until the last one's."""
    plan_seconds: Seconds = 120.0
    """Until all members have made the plan and are connected."""
    stage_seconds: Seconds = 120.0
    """Until all inference ranks have everything, or all of a wave."""
    commit_seconds: Seconds = 60.0
    """Until all instances serve the update, or have applied a wave."""
    policy: Policy | None = None
    """What becomes of requests that run when an instance applies the update; None leaves that to
    the instance."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """How the update is cut into writes."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.mode == "wave" and self.policy == "keep":
            raise InvalidArgument(
                'policy is "keep", and mode is "wave": no request can run on between two waves; '
                'use "drain" or "abort"'
            )
