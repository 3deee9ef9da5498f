"""The time that a registration lives without a heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.settings import Seconds, check_bounds


@dataclass(frozen=True, slots=True)
class LeasePolicy:
    """The length of a lease: three heartbeats, so that one lost heartbeat ends no registration."""

    lease_seconds: Seconds = 6.0
    """A worker without a heartbeat for this long is gone."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument."""
        check_bounds(self)

    @property
    def heartbeat_interval(self) -> float:
        return self.lease_seconds / 3
