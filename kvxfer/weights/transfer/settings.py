"""The settings of a weight update: its mode, deadlines, policy and digests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvxfer.errors import InvalidArgument
from kvxfer.settings import Seconds, check_bounds
from kvxfer.weights.plan.settings import ScheduleSettings

Policy: TypeAlias = Literal["drain", "abort", "keep"]
"""The fate of running requests. "drain": they end first. "abort": they are aborted, and may be sent
again. "keep": they continue with the new weights."""

Mode: TypeAlias = Literal["atomic", "wave"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The settings of updates, for the coordinator, which passes them to the members. Raises
    InvalidArgument that names the setting and its bounds."""

    mode: Mode = "atomic"
    """"atomic": inference ranks stage everything, and serve the old version meanwhile. "wave": they
    stage as much as their arenas take and apply it, until they have everything. An instance is out
    of service from its first wave to its last."""
    digests: bool = True
    """Whether all bytes are checked on arrival."""
    ready_seconds: Seconds = 60.0
    """The longest time from the first training rank's push to the last one's."""
    plan_seconds: Seconds = 120.0
    """The longest time until all members have made the plan and are connected."""
    stage_seconds: Seconds = 120.0
    """The longest time until all inference ranks have staged everything, or a wave."""
    commit_seconds: Seconds = 60.0
    """The longest time until all instances serve the update, or have applied a wave."""
    policy: Policy | None = None
    """The fate of requests that run when an instance applies the update; None leaves that to the
    instance."""
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    """The sizes by which the update is cut into writes."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.mode == "wave" and self.policy == "keep":
            raise InvalidArgument(
                'policy is "keep", and mode is "wave": no request can run on between two waves; '
                'use "drain" or "abort"'
            )
