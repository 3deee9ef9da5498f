"""OFFERs that were lost with their connection: what prefill is told over another one."""

from __future__ import annotations

from kvxfer.clock import Clock
from kvxfer.kv.messages import Release
from kvxfer.ticket import Ticket


class LostOffers:
    """The decode side's: each until its ticket expires, as no connection is sure to last until
    prefill has heard. Loop only."""

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
