"""What an endpoint hears from its peers, and to whom it passes it on."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from kvxfer.clock import Clock
from kvxfer.errors import (
    EngineError,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    ProtocolError,
    TicketInvalid,
    TransferError,
    TransferRefused,
    by_code,
)
from kvxfer.instances import Role
from kvxfer.kv.admission import require_peer
from kvxfer.kv.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Expect,
    Hello,
    Keep,
    Offer,
    Refused,
    Release,
    decode,
)
from kvxfer.kv.waiting import LostOffers

if TYPE_CHECKING:
    from kvxfer.engine import Peer
    from kvxfer.kv.admission import Identity
    from kvxfer.kv.counts import Refusals, TransferCounts
    from kvxfer.kv.pair import KvPair
    from kvxfer.kv.pairs import Pairs
    from kvxfer.kv.rendezvous import Rendezvous
    from kvxfer.kv.waiting import Expectations
    from kvxfer.ticket import Ticket

logger = logging.getLogger(__name__)


class Reception:
    """The EngineHandler of an endpoint: called by the engine on the loop."""

    def __init__(
        self,
        identity: Identity,
        pairs: Pairs,
        rendezvous: Rendezvous,
        expectations: Expectations,
        refusals: Refusals,
        counts: TransferCounts,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._pairs = pairs
        self._rendezvous = rendezvous
        self._expectations = expectations
        self._refusals = refusals
        self._counts = counts
        self._lost_offers = LostOffers(clock)

    def peer_up(self, peer: Peer) -> None:
        self._tell_of_lost_offers(self._pairs.of(peer))

    def peer_lost(self, peer: Peer, error: KvxferError) -> None:
        pair = self._pairs.get(peer)
        if pair is not None:
            logger.info("peer %s is lost: %s", peer.engine_id, error)
            self._counts.lost_peers[error.code] += 1
            self.drop(pair, error)

    def message(self, peer: Peer, data: bytes) -> None:
        pair = self._pairs.get(peer)
        if pair is None:
            return  # cut off, with messages of it still on their way
        try:
            self._dispatch(pair, data)
        except ProtocolError as error:
            self._refusals.count("message", error)
            self.cut_off(pair, error)

    def _dispatch(self, pair: KvPair, data: bytes) -> None:
        match decode(data):
            case Hello() as hello:
                pair.greet(hello)
            case Offer() as offer:
                self._on_offer(pair, offer)
            case Release() as release:
                self._on_release(pair, release)
            case Keep() as keep:
                self._on_keep(pair, keep)
            case Expect() as expect:
                self._on_expect(pair, expect)
            case Cancel(transfer_id, reason):
                self._on_cancel(pair, transfer_id, reason)
            # Below, a transfer that is unknown has ended here in the meantime.
            case Accepted(transfer_id):
                if inbound := pair.decodes.get(transfer_id):
                    inbound.accepted()
            case Refused(transfer_id, code, reason):
                if inbound := pair.decodes.get(transfer_id):
                    inbound.refused(_refusal(pair, transfer_id, code, reason))
            case Done() as done:
                if inbound := pair.decodes.get(done.transfer_id):
                    inbound.done(done)
            case Cancelled(transfer_id):
                if inbound := pair.decodes.get(transfer_id):
                    inbound.cancel_answered()

    def _on_offer(self, pair: KvPair, offer: Offer) -> None:
        try:
            self._rendezvous.offer(pair, offer, self._verify(pair, offer, "offer"))
        except TransferError as error:
            logger.info("offer refused: %s", error)
            self._refusals.count("offer", error)
            self._rendezvous.offer_refused(pair, offer.transfer_id, error)
            with contextlib.suppress(EngineError):
                pair.send(Refused(offer.transfer_id, error.code, str(error)))

    def _on_release(self, pair: KvPair, release: Release) -> None:
        try:
            claims = self._verify(pair, release, "release")
            self._rendezvous.release(pair, claims, release.reason)
        except TransferError as error:
            logger.info("release ignored: %s", error)
            self._refusals.count("release", error)

    def _on_keep(self, pair: KvPair, keep: Keep) -> None:
        try:
            claims = self._verify(pair, keep, "keep")
            self._rendezvous.keep(pair, claims, keep.lease_seconds)
        except (TransferError, InvalidArgument) as error:
            logger.info("keep ignored: %s", error)
            self._refusals.count("keep", error)

    def _verify(self, pair: KvPair, message: Offer | Release | Keep, what: str) -> Ticket:
        """The ticket that a decode worker sends. Raises TicketInvalid and TicketExpired."""
        claims = self._identity.verify(message.ticket)
        self._identity.require(claims, Role.PREFILL)
        if claims.transfer_id != message.transfer_id:
            raise TicketInvalid(
                f"the {what} of transfer {message.transfer_id} carries the ticket of transfer "
                f"{claims.transfer_id}"
            )
        require_peer(claims, Role.DECODE, pair.hello, f"the {what} is from")
        return claims

    def _on_expect(self, pair: KvPair, expect: Expect) -> None:
        hello = pair.hello
        try:
            claims = self._identity.verify(expect.ticket)
            self._identity.require(claims, Role.DECODE)
            require_peer(claims, Role.PREFILL, hello, "an offer is expected by")
        except TransferError as error:
            logger.info("expected offer refused: %s", error)
            self._refusals.count("expect", error)
            with contextlib.suppress(EngineError):
                pair.send(Cancel(expect.transfer_id, str(error)))
        else:
            self._expectations.expect(claims, pair)

    def _on_cancel(self, pair: KvPair, transfer_id: str, reason: str) -> None:
        if inbound := pair.decodes.get(transfer_id):
            inbound.cancelled_by_peer(reason)
        else:
            self._expectations.cancel(pair, transfer_id, reason)
            self._rendezvous.cancel(pair, transfer_id, reason)

    def cut_off(self, pair: KvPair, error: KvxferError) -> None:
        """Ends the connection to a peer that cannot be talked to."""
        logger.warning("peer %s is cut off: %s", pair.peer.engine_id, error)
        with contextlib.suppress(EngineError):  # it may be lost already
            pair.peer.fence()
        self.drop(pair, error)

    def drop(self, pair: KvPair, error: KvxferError) -> None:
        """Ends everything with a peer that is gone; no block of its transfers stays taken."""
        self._pairs.remove(pair, error)
        for inbound in list(pair.decodes.values()):
            if not inbound.answered:
                self._lost_offers.add(
                    pair.peer.engine_id, *inbound.ticket, f"its OFFER was lost: {error}"
                )
            inbound.peer_lost(error)
        for other in self._pairs:
            if other.peer.engine_id == pair.peer.engine_id:
                self._tell_of_lost_offers(other)
        self._expectations.drop(pair, error)
        self._rendezvous.drop(pair, error)

    def _tell_of_lost_offers(self, pair: KvPair) -> None:
        for release in self._lost_offers.of(pair.peer.engine_id):
            with contextlib.suppress(EngineError):
                pair.send(release)


def _refusal(pair: KvPair, transfer_id: str, code: str, reason: str) -> TransferError:
    """The error that decode raises for a REFUSED: prefill's own where it is about transfers."""
    text = f"transfer {transfer_id}: refused by prefill worker {pair.hello.instance_id!r}: {reason}"
    kind = by_code(code)
    if issubclass(kind, TransferError) and kind is not LayoutMismatch:
        return kind(text)
    return TransferRefused(f"{text} ({code})")
