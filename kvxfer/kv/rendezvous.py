"""Brings the OFFER and the prefill request of each transfer together, whichever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

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
    from kvxfer.kv.counts import Refusals
    from kvxfer.kv.pair import KvPair
    from kvxfer.layout import KvLayout
    from kvxfer.ticket import Ticket
    from kvxfer.tracing.span import Span

logger = logging.getLogger(__name__)

_MAX_IMM: Final = 2**32 - 1

OnOffer: TypeAlias = "Callable[[Ticket, str], None]"
"""Told of an OFFER that waits for its prefill request: its ticket, and that as a token."""


class Rendezvous:
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
        on_offer: OnOffer | None = None,
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
        """Those that have not ended."""
        return tuple(self._sessions.values())

    def __len__(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    async def request(
        self,
        claims: Ticket,
        blocks: SourceBlocks,
        lease_seconds: float,
        *,
        dials: bool,
        adapter: str = "",
        span: Span | None = None,
    ) -> PrefillSession:
        """A session for a prefill request whose ticket is verified. `dials`: it connects to decode.

        Raises TicketInvalid for a second one, and what has ended the transfer already: the loss of
        decode, where its OFFER would have to come over a connection that is gone.
        """
        transfer_id = claims.transfer_id
        self._ledger.claim(claims, "prefill session")
        failure = self._ledger.failure(transfer_id)
        if failure is not None:
            raise failure
        early = self._early.take(transfer_id)
        loss = None if dials else self._loss_of_decode(claims)
        if loss is not None:
            self._abandon(transfer_id, loss, early)
            raise loss
        # With a ticket that has expired no OFFER is taken up.
        left = claims.expires_at - self._clock.unix()
        lease = left if 0 < left < lease_seconds else lease_seconds
        try:
            session = PrefillSession(
                claims,
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
                session.accept(one.pair, one.offer, one.blocks, one.lease.remaining())
            except KvxferError as error:
                self._abandon(transfer_id, error, early[index:])
                await session.cancel(str(error))
                raise
        return session

    def decline(self, claims: Ticket, reason: str) -> None:
        """Refuses the OFFER of a transfer that will have no session, now or when it comes."""
        self._ledger.claim(claims, "prefill session")
        error = TransferCancelled(f"transfer {claims.transfer_id}: cancelled here: {reason}")
        self._abandon(claims.transfer_id, error, self._early.take(claims.transfer_id))

    def offer(self, pair: KvPair, offer: Offer, claims: Ticket) -> None:
        """Takes an OFFER whose ticket is verified; refuses it by a message where it cannot be met.

        Raises TicketInvalid where the ticket was used for an offer before.
        """
        self._ledger.claim_by(claims, "offer", pair.hello)
        session = self._sessions.get(claims.transfer_id)
        try:
            failure = session.error if session else self._ledger.failure(claims.transfer_id)
            if failure is not None:
                raise failure
            # These raise LayoutMismatch, before any byte moves.
            pair.require_same_model(Role.PREFILL)
            _ = pair.writes
            blocks = unpack_block_table(offer.blocks, pair.hello.num_blocks, pair.hello.layout)
            plan = pair.outbound_plan
            planes = len(plan.layers) * len(plan.decode.parts)
            if len(offer.grants) != planes:
                raise InvalidArgument(
                    f"{len(offer.grants)} grants for the {planes} planes of "
                    f"{pair.hello.instance_id!r}; run the same version of kvxfer on both sides"
                )
            if not 0 <= offer.imm <= _MAX_IMM:
                raise InvalidArgument(f"immediate {offer.imm} has more than 32 bits")
            if offer.first_block < 0:
                raise InvalidArgument(f"first_block is {offer.first_block}; pass 0 or more")
            if session is None:
                self._early.keep(
                    pair,
                    offer,
                    blocks,
                    claims.expires_at,
                    lease_over=self._lease_over,
                    ticket_expired=self._ticket_expired,
                )
                if self._on_offer is not None:
                    self._on_offer(claims, offer.ticket)
            else:
                session.accept(pair, offer, blocks, offer.lease_seconds)
        except KvxferError as error:
            self._refuse(pair, claims.transfer_id, error)
            if session is None:
                self._abandon(claims.transfer_id, error, self._early.take(claims.transfer_id))
            else:
                session.fail(error)

    def offer_refused(self, pair: KvPair, transfer_id: str, error: KvxferError) -> None:
        """An OFFER came whose ticket is not good here: nobody waits for it any longer."""
        session = self._sessions.get(transfer_id)
        if session is not None:
            session.offer_refused(pair, error)

    def release(self, pair: KvPair, claims: Ticket, reason: str) -> None:
        """Decode says that no OFFER will come. Raises TicketInvalid where one has come, unless the
        transfer has failed since."""
        transfer_id = claims.transfer_id
        if self._ledger.failure(transfer_id) is not None:
            return
        self._ledger.claim_by(claims, "offer", pair.hello)
        error = TransferCancelled(
            f"transfer {transfer_id}: released by decode worker {pair.hello.instance_id!r}: "
            f"{reason}"
        )
        session = self._sessions.get(transfer_id)
        if session is None:
            self._abandon(transfer_id, error, self._early.take(transfer_id))
        else:
            session.fail(error)

    def keep(self, pair: KvPair, claims: Ticket, lease_seconds: float) -> None:
        """Decode says that its OFFER will come later. Raises TicketInvalid where the ticket is
        another worker's, and InvalidArgument for a lease that is none."""
        session = self._sessions.get(claims.transfer_id)
        if session is not None:
            self._ledger.bind(claims, pair.hello)
            session.keep(pair, min(lease_seconds, claims.expires_at - self._clock.unix()))

    def cancel(self, pair: KvPair, transfer_id: str, reason: str) -> None:
        """Decode gives a transfer up."""
        session = self._sessions.get(transfer_id)
        if session is not None and pair in session.pairs:
            session.cancelled_by_peer(pair, reason)
            return
        if self._early.has(transfer_id, pair):  # nobody cancels what others have offered
            early = self._early.take(transfer_id)
            error = TransferCancelled(
                f"transfer {transfer_id}: cancelled by decode worker "
                f"{pair.hello.instance_id!r}: {reason}"
            )
            self._abandon(transfer_id, error, [one for one in early if one.pair is not pair])
            for one in early:
                one.end()
        with contextlib.suppress(EngineError):
            pair.send(Cancelled(transfer_id, 0))

    def drop(self, pair: KvPair, error: KvxferError) -> None:
        """The decode worker is gone."""
        for lost in self._early.take_all(pair):
            lost.end()
            transfer_id = lost.offer.transfer_id
            self._abandon(transfer_id, error, self._early.take(transfer_id))
        for session in list(self._sessions.values()):
            # Also one that its OFFER has not reached: there will be none.
            if pair in session.pairs or session.awaits(pair):
                session.peer_lost(pair, error)

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
            self._refuse(one.pair, transfer_id, error)

    def _refuse(self, pair: KvPair, transfer_id: str, error: KvxferError) -> None:
        logger.info("offer refused: %s", error)
        self._refusals.count("offer", error)
        with contextlib.suppress(EngineError):
            pair.send(Refused(transfer_id, error.code, str(error)))

    def _ended(self, session: PrefillSession) -> None:
        del self._sessions[session.transfer_id]
        if session.error is not None:
            self._ledger.fail(session.transfer_id, session.error)
        self._on_end(session)
