"""Brings the OFFER and the prefill request of each transfer together, whichever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.clock import Clock
from kvxfer.errors import (
    EngineError,
    InvalidArgument,
    KvxferError,
    LeaseExpired,
    TicketExpired,
    TransferCancelled,
)
from kvxfer.instances import Role
from kvxfer.kv.blocks import unpack_block_table
from kvxfer.kv.messages import Cancelled, Offer, Refused
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.waiting import EarlyOffer, EarlyOffers

if TYPE_CHECKING:
    from kvxfer.kv.admission import TransferLedger
    from kvxfer.kv.blocks import SourceBlocks
    from kvxfer.kv.connection import Connection
    from kvxfer.kv.counts import Refusals
    from kvxfer.layout import KvLayout
    from kvxfer.ticket import Ticket
    from kvxfer.tracing.span import Span

logger = logging.getLogger(__name__)

_MAX_IMM: Final = 2**32 - 1


class PrefillSide:
    """The prefill side of an endpoint: sessions that wait, and offers that wait. Loop only.

    A transfer that fails on one side before the other has come is remembered in the ledger, so
    that the other is told at once.
    """

    def __init__(
        self,
        instance_id: str,
        layout: KvLayout,
        ledger: TransferLedger,
        *,
        max_early_offers_per_peer: int,
        ended: Callable[[PrefillSession], None],
        refusals: Refusals,
        loss_of_decode: Callable[[Ticket], KvxferError | None],
        on_offer: Callable[[Ticket], None] | None = None,
        clock: Clock,
    ) -> None:
        self._instance_id = instance_id
        self._layout = layout
        self._ledger = ledger
        self._sessions: dict[str, PrefillSession] = {}
        self._on_end = ended
        self._refusals = refusals
        self._loss_of_decode = loss_of_decode
        self._on_offer = on_offer
        self._clock = clock
        self._early = EarlyOffers(max_early_offers_per_peer, clock)

    @property
    def sessions(self) -> tuple[PrefillSession, ...]:
        """The sessions that have not ended."""
        return tuple(self._sessions.values())

    def __len__(self) -> int:
        """Returns the number of sessions that have not ended."""
        return len(self._sessions)

    async def request(
        self,
        ticket: Ticket,
        blocks: SourceBlocks,
        lease_seconds: float,
        *,
        dials: bool,
        adapter: str = "",
        span: Span | None = None,
    ) -> PrefillSession:
        """Returns a session for a prefill request whose ticket is verified. `dials`: the session
        connects to decode.

        Raises TicketInvalid for a second one, and the error that has already ended the transfer,
        such as the loss of decode if its OFFER would have to come over the lost connection.
        """
        transfer_id = ticket.transfer_id
        self._ledger.claim(ticket, "prefill session")
        failure = self._ledger.failure(transfer_id)
        if failure is not None:
            raise failure
        early = self._early.take(transfer_id)
        loss = None if dials else self._loss_of_decode(ticket)
        if loss is not None:
            self._abandon(transfer_id, loss, early)
            raise loss
        # No OFFER is accepted under an expired ticket.
        left = ticket.good_until - self._clock.unix()
        lease = left if 0 < left < lease_seconds else lease_seconds
        try:
            session = PrefillSession(
                ticket,
                blocks,
                self._layout,
                lease,
                self._ended,
                span,
                adapter=adapter,
                clock=self._clock,
            )
        except KvxferError as error:
            self._abandon(transfer_id, error, early)
            raise
        self._sessions[transfer_id] = session
        for index, one in enumerate(early):
            one.end()
            try:
                session._accept(one.connection, one.offer, one.blocks, one.lease.remaining())
            except KvxferError as error:
                self._abandon(transfer_id, error, early[index:])
                await session.cancel(str(error))
                raise
        return session

    def decline(self, ticket: Ticket, reason: str) -> None:
        """Refuses the OFFER of a transfer that will have no session, now or when it comes."""
        self._ledger.claim(ticket, "prefill session")
        error = TransferCancelled(f"transfer {ticket.transfer_id}: cancelled here: {reason}")
        self._abandon(ticket.transfer_id, error, self._early.take(ticket.transfer_id))

    def offer(self, connection: Connection, offer: Offer, ticket: Ticket) -> None:
        """Takes an OFFER whose ticket is verified. If it cannot be served, sends a REFUSED.

        Raises TicketInvalid if the ticket was used for an offer before.
        """
        self._ledger.claim_by(ticket, "offer", connection.hello)
        session = self._sessions.get(ticket.transfer_id)
        try:
            failure = session.error if session else self._ledger.failure(ticket.transfer_id)
            if failure is not None:
                raise failure
            # The checks raise LayoutMismatch or InvalidArgument before any byte moves.
            connection.require_same_model(Role.PREFILL)
            connection.require_touchable(Role.PREFILL)
            _ = connection.writes
            blocks = unpack_block_table(
                offer.blocks, connection.hello.num_blocks, connection.hello.layout
            )
            plan = connection.outbound_plan
            planes = plan.first_grants[-1]
            if len(offer.grants) != planes:
                raise InvalidArgument(
                    f"{len(offer.grants)} grants for the {planes} planes of "
                    f"{connection.hello.instance_id!r}; run the same version of kvxfer on both "
                    "sides"
                )
            if not 0 <= offer.imm <= _MAX_IMM:
                raise InvalidArgument(f"immediate {offer.imm} has more than 32 bits")
            if offer.first_block < 0:
                raise InvalidArgument(f"first_block is {offer.first_block}; pass 0 or more")
            if session is None:
                self._early.keep(
                    connection,
                    offer,
                    blocks,
                    ticket.good_until,
                    lease_over=self._lease_over,
                    ticket_expired=self._ticket_expired,
                )
                if self._on_offer is not None:
                    self._on_offer(ticket)
            else:
                session._accept(connection, offer, blocks, offer.lease_seconds)
        except KvxferError as error:
            self._refuse(connection, ticket.transfer_id, error)
            if session is None:
                self._abandon(ticket.transfer_id, error, self._early.take(ticket.transfer_id))
            else:
                session._fail(error)

    def offer_refused(self, connection: Connection, transfer_id: str, error: KvxferError) -> None:
        """Ends the wait for an OFFER that was refused for its ticket."""
        session = self._sessions.get(transfer_id)
        if session is not None:
            session._offer_refused(connection, error)

    def release(self, connection: Connection, ticket: Ticket, reason: str) -> None:
        """Takes decode's message that no OFFER will come. Raises TicketInvalid if one has come,
        unless the transfer has failed since."""
        transfer_id = ticket.transfer_id
        if self._ledger.failure(transfer_id) is not None:
            return
        self._ledger.claim_by(ticket, "offer", connection.hello)
        error = TransferCancelled(
            f"transfer {transfer_id}: released by decode worker {connection.hello.instance_id!r}: "
            f"{reason}"
        )
        session = self._sessions.get(transfer_id)
        if session is None:
            self._abandon(transfer_id, error, self._early.take(transfer_id))
        else:
            session._fail(error)

    def keep(self, connection: Connection, ticket: Ticket, lease_seconds: float) -> None:
        """Takes decode's message that its OFFER will come later. Raises TicketInvalid if the ticket
        is another worker's, and InvalidArgument for an invalid lease."""
        session = self._sessions.get(ticket.transfer_id)
        if session is not None:
            self._ledger.bind(ticket, connection.hello)
            session._keep(connection, min(lease_seconds, ticket.good_until - self._clock.unix()))

    def cancel(self, connection: Connection, transfer_id: str, reason: str) -> None:
        """Takes decode's message that it cancels a transfer."""
        session = self._sessions.get(transfer_id)
        if session is not None and connection in session._met:
            session._cancelled_by_peer(connection, reason)
            return
        if self._early.has(transfer_id, connection):  # a peer cancels its own offers only
            early = self._early.take(transfer_id)
            error = TransferCancelled(
                f"transfer {transfer_id}: cancelled by decode worker "
                f"{connection.hello.instance_id!r}: {reason}"
            )
            self._abandon(
                transfer_id, error, [one for one in early if one.connection is not connection]
            )
            for one in early:
                one.end()
        with contextlib.suppress(EngineError):
            connection.send(Cancelled(transfer_id, 0))

    def drop(self, connection: Connection, error: KvxferError) -> None:
        """Ends the transfers of a lost decode worker."""
        for lost in self._early.take_all(connection):
            lost.end()
            transfer_id = lost.offer.transfer_id
            self._abandon(transfer_id, error, self._early.take(transfer_id))
        for session in list(self._sessions.values()):
            # Also a session whose OFFER has not come: there will be none.
            if connection in session._met or session._awaits(connection):
                session._peer_lost(connection, error)

    async def close(self, reason: str) -> None:
        """Cancels every session and offer; nothing of them is under way when this returns."""
        for early in self._early.take_all():
            self._abandon(early.offer.transfer_id, TransferCancelled(reason), [early])
        await asyncio.gather(*(session.cancel(reason) for session in self._sessions.values()))

    def _lease_over(self, early: EarlyOffer) -> None:
        self._expired(early, LeaseExpired, f"within {early.lease.seconds:g} s")

    def _ticket_expired(self, early: EarlyOffer) -> None:
        self._expired(early, TicketExpired, "before its ticket expired")

    def _expired(self, early: EarlyOffer, kind: type[KvxferError], when: str) -> None:
        transfer_id = early.offer.transfer_id
        error = kind(
            f"transfer {transfer_id}: no request came to prefill worker {self._instance_id!r} "
            f"{when}"
        )
        self._abandon(transfer_id, error, [early, *self._early.take(transfer_id)])

    def _abandon(self, transfer_id: str, error: KvxferError, early: Sequence[EarlyOffer]) -> None:
        """Ends a transfer that has no session here."""
        self._ledger.fail(transfer_id, error)
        for one in early:
            one.end()
            self._refuse(one.connection, transfer_id, error)

    def _refuse(self, connection: Connection, transfer_id: str, error: KvxferError) -> None:
        logger.info("offer refused: %s", error)
        self._refusals.count("offer", error)
        with contextlib.suppress(EngineError):
            connection.send(Refused(transfer_id, error.code, str(error)))

    def _ended(self, session: PrefillSession) -> None:
        del self._sessions[session.transfer_id]
        if session.error is not None:
            self._ledger.fail(session.transfer_id, session.error)
        self._on_end(session)
