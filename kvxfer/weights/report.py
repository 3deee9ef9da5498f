"""The outcome of a weight update."""

from __future__ import annotations

from typing import Literal

import msgspec


class InstanceReport(msgspec.Struct, frozen=True):
    """The outcome of an update at one instance."""

    instance_id: str
    ranks: int
    state: Literal["committed", "aborted", "failed", "lost", "partial"]
    """"failed" and "lost": out of service.
    "partial": has only some waves of an update, and is out of service until the next update."""
    version: int | None
    """The version that it serves; None if unknown or out of service."""
    digest: str | None = None
    """The sum of the digests of its ranks, modulo 2**64, as 16 hex digits; None without digests."""
    pause_seconds: float | None = None
    """Seconds from the end of its last step before the update to the begin of its first step after
    it; None if its engine does not measure them."""
    error: str | None = None

    @property
    def in_service(self) -> bool:
        """Whether it may serve requests."""
        return self.state not in ("failed", "lost", "partial")


class UpdateReport(msgspec.Struct, frozen=True):
    """The outcome of one update."""

    update_id: str
    version: int
    state: Literal["committed", "aborted"]
    nbytes: int
    """Bytes that the plan sends to all inference ranks."""
    plan_seconds: float = 0.0
    """Seconds to make the plan; 0 if that of the previous update was used."""
    stage_seconds: float = 0.0
    """Seconds from the order to write until the last rank staged, summed over the waves."""
    commit_seconds: float = 0.0
    """Seconds from the order to commit until the last instance answered."""
    instances: tuple[InstanceReport, ...] = ()
    error: str | None = None
    """The error that aborted it, or an error after the commit."""
    code: str | None = None
    """The code of the error that aborted it."""
    mode: Literal["atomic", "wave"] = "atomic"
    waves: int = 1

    @property
    def out_of_service(self) -> tuple[str, ...]:
        """The instances that serve no request."""
        return tuple(each.instance_id for each in self.instances if not each.in_service)
