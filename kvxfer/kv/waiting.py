"""Halves of transfers that wait for the other half: offers for their prefill request, EXPECTs and
decode requests of brokered transfers for each other. Also records of lost connections, for requests
and peers that come later."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvxfer.clock import Clock
from kvxfer.errors import (
    Backpressure,
    KvxferError,
    LeaseExpired,
    TicketInvalid,
    TransferCancelled,
    without_traceback,
)
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.connection import Connection
from kvxfer.kv.messages import Offer, Release
from kvxfer.kv.session_state import Lease
from kvxfer.ticket import Ticket

_LEAST_SECONDS: Final = 0.001


@dataclass(frozen=True, slots=True)
class EarlyOffer:
    """A verified OFFER, its unpacked block table, the lease that decode gave it, and the time until
    its ticket expires."""

    connection: Connection
    offer: Offer
    blocks: BlockIds
    lease: Lease
    ticket: Lease

    def end(self) -> None:
        """Stops both timers."""
        self.lease.end()
        self.ticket.end()


class EarlyOffers:
    """Offers that are kept until their request comes, their lease ends or their ticket expires.
    Loop only."""

    def __init__(self, max_per_peer: int, clock: Clock) -> None:
        self._max_per_peer = max_per_peer
        self._clock = clock
        # Offers by transfer, then by the connection to a rank of decode.
        self._offers: dict[str, dict[Connection, EarlyOffer]] = {}
        self._per_peer: collections.Counter[Connection] = collections.Counter()

    def __len__(self) -> int:
        return self._per_peer.total()

    def keep(
        self,
        connection: Connection,
        offer: Offer,
        blocks: BlockIds,
        good_until: float,
        *,
        lease_over: Callable[[EarlyOffer], None],
        ticket_expired: Callable[[EarlyOffer], None],
    ) -> None:
        """Keeps an offer whose ticket is valid until `good_until`. When its lease ends or its
        ticket expires, the offer is removed, and `lease_over` or `ticket_expired` is called with
        it.

        Raises Backpressure if the peer has too many waiting.
        """
        if self._per_peer[connection] >= self._max_per_peer:
            raise Backpressure(
                f"transfer {offer.transfer_id}: {self._max_per_peer} offers of this decode worker "
                "wait for their prefill requests already; send requests to prefill first"
            )

        def remove() -> EarlyOffer:
            early = self._remove(offer.transfer_id, connection)
            early.end()
            return early

        lease = Lease(offer.lease_seconds, lambda: lease_over(remove()), self._clock)
        left = max(good_until - self._clock.unix(), _LEAST_SECONDS)
        ticket = Lease(left, lambda: ticket_expired(remove()), self._clock)
        early = EarlyOffer(connection, offer, blocks, lease, ticket)
        self._offers.setdefault(offer.transfer_id, {})[connection] = early
        self._per_peer[connection] += 1

    def has(self, transfer_id: str, connection: Connection) -> bool:
        """Whether one of the transfer's offers is from this peer."""
        return connection in self._offers.get(transfer_id, ())

    def take(self, transfer_id: str) -> list[EarlyOffer]:
        """Removes and returns the offers of a transfer, which the caller has to end."""
        return [
            self._remove(transfer_id, connection)
            for connection in list(self._offers.get(transfer_id, ()))
        ]

    def take_all(self, connection: Connection | None = None) -> list[EarlyOffer]:
        """Removes and returns the offers of one peer, or of all."""
        found = [
            (transfer_id, peer)
            for transfer_id, by_peer in self._offers.items()
            for peer in by_peer
            if connection is None or peer is connection
        ]
        return [self._remove(transfer_id, peer) for transfer_id, peer in found]

    def _remove(self, transfer_id: str, connection: Connection) -> EarlyOffer:
        by_peer = self._offers[transfer_id]
        early = by_peer.pop(connection)
        if not by_peer:
            del self._offers[transfer_id]
        self._per_peer[connection] -= 1
        if not self._per_peer[connection]:
            del self._per_peer[connection]
        return early


@dataclass(slots=True)
class _Expected:
    """A prefill worker that waits for the OFFER over this connection; with an error, it no longer
    waits."""

    ticket: Ticket
    connection: Connection
    error: KvxferError | None = None


class ExpectedOffers:
    """The decode side of an endpoint before there is a session. Loop only.

    An EXPECT is remembered until its ticket expires, also if prefill cancels or is lost meanwhile:
    then a decode request fails at once. One that finds no free blocks may come again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._expected: dict[str, _Expected] = {}
        self._waiting: dict[str, asyncio.Future[_Expected]] = {}

    def __len__(self) -> int:
        """Returns the number of decode requests that wait."""
        return len(self._waiting)

    def expect(self, ticket: Ticket, connection: Connection) -> None:
        """Takes an EXPECT whose ticket is verified."""
        self._forget_expired()
        expected = self._expected[ticket.transfer_id] = _Expected(ticket, connection)
        waiting = self._waiting.get(ticket.transfer_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(expected)

    def cancel(self, connection: Connection, transfer_id: str, reason: str) -> None:
        """Notes that prefill cancels a transfer that has no session here."""
        expected = self._expected.get(transfer_id)
        if expected is not None and expected.connection is connection:
            expected.error = TransferCancelled(
                f"transfer {transfer_id}: cancelled by prefill worker "
                f"{expected.ticket.prefill_id!r}: {reason}"
            )

    def drop(self, connection: Connection, error: KvxferError) -> None:
        """Notes that a prefill worker is lost."""
        for expected in self._expected.values():
            if expected.connection is connection:
                expected.error = expected.error or error

    def close(self, error: KvxferError) -> None:
        """Ends all waits."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)

    async def prefill_of(self, ticket: Ticket, seconds: float) -> Connection:
        """Returns the connection of a ticket's prefill worker once that waits for the OFFER.

        Raises LeaseExpired after `seconds`, TicketInvalid if another request already waits under
        this ticket, and the error if prefill has cancelled or is lost.
        """
        transfer_id = ticket.transfer_id
        if transfer_id in self._waiting:
            raise TicketInvalid(
                f"the ticket of transfer {transfer_id} is in use: another decode request waits for "
                "its prefill worker; ask the control plane for a new one"
            )
        expected = self._expected.get(transfer_id)
        if expected is None:
            waiting = self._waiting[transfer_id] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(seconds):
                    expected = await waiting
            except TimeoutError:
                raise LeaseExpired(
                    f"transfer {transfer_id}: prefill worker {ticket.prefill_id!r} did not ask for "
                    f"an offer within {seconds:g} s; send it the request too, with a brokered "
                    "handshake and the address of this engine"
                ) from None
            finally:
                del self._waiting[transfer_id]
        if expected.error is not None:
            raise expected.error
        return expected.connection

    def _forget_expired(self) -> None:
        now = self._clock.unix()
        while self._expected:
            transfer_id, oldest = next(iter(self._expected.items()))
            if oldest.ticket.good_until > now:
                return
            del self._expected[transfer_id]


MAX_REMEMBERED: Final = 1024

Worker: TypeAlias = tuple[str, int]
"""Instance id and epoch."""


class LostWorkers:
    """The last loss of each rank of at most `max_remembered` workers; the worker with the oldest
    loss is forgotten first. Loop only."""

    def __init__(self, clock: Clock, max_remembered: int = MAX_REMEMBERED) -> None:
        self._clock = clock
        self._max_remembered = max_remembered
        self._losses: dict[Worker, dict[int, tuple[float, KvxferError]]] = {}

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, worker: Worker, rank: int, error: KvxferError) -> None:
        """Notes that the connection to a rank has ended now."""
        losses = self._losses.pop(worker, {})
        losses[rank] = self._clock.monotonic(), without_traceback(error)
        self._losses[worker] = losses
        if len(self._losses) > self._max_remembered:
            del self._losses[next(iter(self._losses))]

    def since(self, worker: Worker, issued_at: float) -> dict[int, KvxferError]:
        """Returns the errors of ranks that were lost after a ticket was issued; none if the time of
        its issue is unknown."""
        if not issued_at:
            return {}
        losses = self._losses.get(worker, {})
        # Converted by the current wall clock, which may have been set since the loss.
        issued = self._clock.monotonic() - (self._clock.unix() - issued_at)
        return {rank: error for rank, (at, error) in losses.items() if at >= issued}


class LostOffers:
    """Decode's OFFERs that prefill may not have received. Each is kept until its ticket expires, as
    any connection may end before prefill is told. Loop only."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._releases: dict[str, tuple[str, float, Release]] = {}  # by transfer

    def add(self, engine_id: str, ticket: Ticket, reason: str) -> None:
        """Adds an OFFER that prefill, at this engine, may not have received."""
        now = self._clock.unix()
        self._releases = {of: kept for of, kept in self._releases.items() if kept[1] > now}
        release = Release(ticket.transfer_id, ticket.token, reason)
        self._releases[ticket.transfer_id] = engine_id, ticket.good_until, release

    def of(self, engine_id: str) -> list[Release]:
        """Returns the RELEASEs for an engine."""
        now = self._clock.unix()
        return [
            release
            for prefill, good_until, release in self._releases.values()
            if prefill == engine_id and good_until > now
        ]
