"""How a weight update ended."""

from __future__ import annotations

from typing import Literal

import msgspec


class InstanceReport(msgspec.Struct, frozen=True):
    """Of one instance."""

    instance_id: str
    ranks: int
    state: Literal["committed", "aborted", "failed", "lost", "partial"]
    """"failed" and "lost": out of service.
    "partial": out of service until the next update, as it has some waves of one."""
    version: int | None
    """That it serves; None where that is not known."""
    digest: str | None = None
    """Of what its ranks staged: the sum of theirs, modulo 2**64, as 16 hex digits."""
    pause_seconds: float | None = None
    """From the end of its last step before to the begin of its first step after; None where its
    engine does not measure it."""
    error: str | None = None

    @property
    def in_service(self) -> bool:
        """Whether it may serve requests."""
        return self.state not in ("failed", "lost", "partial")


class UpdateReport(msgspec.Struct, frozen=True):
    """Of one update."""

    update_id: str
    version: int
    state: Literal["committed", "aborted"]
    nbytes: int
    """Sent to all inference ranks."""
    plan_seconds: float = 0.0
    """For a plan; 0 where the one of the update before was used."""
    stage_seconds: float = 0.0
    """From the order to write until the last rank had staged."""
    commit_seconds: float = 0.0
    """From the order to commit until the last instance had answered."""
    instances: tuple[InstanceReport, ...] = ()
    error: str | None = None
    """Why it was aborted, with the error's code."""
    code: str | None = None
    mode: Literal["atomic", "wave"] = "atomic"
    waves: int = 1

    @property
    def out_of_service(self) -> tuple[str, ...]:
        """The instances that serve no request."""
        return tuple(each.instance_id for each in self.instances if not each.in_service)
