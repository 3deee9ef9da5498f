"""What was lost with a connection: workers, of which later requests hear, and OFFERs, of which
prefill is told over another connection."""

from __future__ import annotations

from typing import Final, TypeAlias

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, without_traceback
from kvxfer.kv.messages import Release
from kvxfer.ticket import Ticket

MAX_REMEMBERED: Final = 1024

Worker: TypeAlias = tuple[str, int]
"""Instance id and epoch."""


class LostWorkers:
    """The last loss of each rank of so many workers; the one that was lost longest ago is forgotten
    first. Loop only."""

    def __init__(self, clock: Clock, max_remembered: int = MAX_REMEMBERED) -> None:
        self._clock = clock
        self._max_remembered = max_remembered
        self._losses: dict[Worker, dict[int, tuple[float, KvxferError]]] = {}

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, worker: Worker, rank: int, error: KvxferError) -> None:
        """The connection to a rank has ended now."""
        losses = self._losses.pop(worker, {})
        losses[rank] = self._clock.monotonic(), without_traceback(error)
        self._losses[worker] = losses
        if len(self._losses) > self._max_remembered:
            del self._losses[next(iter(self._losses))]

    def since(self, worker: Worker, issued_at: float) -> dict[int, KvxferError]:
        """Why ranks were lost after a ticket was issued; none where it does not say when."""
        if not issued_at:
            return {}
        losses = self._losses.get(worker, {})
        # By the clock of now, which may have been set since.
        issued = self._clock.monotonic() - (self._clock.unix() - issued_at)
        return {rank: error for rank, (at, error) in losses.items() if at >= issued}


class LostOffers:
    """Decode's OFFERs that prefill may not have heard of. Each is kept until its ticket expires, as
    no connection is sure to last until prefill has heard. Loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._releases: dict[str, tuple[str, float, Release]] = {}  # by transfer

    def add(self, engine_id: str, ticket: Ticket, token: str, reason: str) -> None:
        """Whether prefill, which is this engine, has heard of the OFFER is not known."""
        now = self._clock.unix()
        self._releases = {of: kept for of, kept in self._releases.items() if kept[1] > now}
        release = Release(ticket.transfer_id, token, reason)
        self._releases[ticket.transfer_id] = engine_id, ticket.expires_at, release

    def of(self, engine_id: str) -> list[Release]:
        """What an engine is to be told."""
        now = self._clock.unix()
        return [
            release
            for prefill, expires_at, release in self._releases.values()
            if prefill == engine_id and expires_at > now
        ]
