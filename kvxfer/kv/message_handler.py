"""Passes the messages and losses of an endpoint's peers on to the transfers that they concern."""

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
    from kvxfer.kv.admission import CurrentIdentity
    from kvxfer.kv.connection import Connection
    from kvxfer.kv.connections import Connections
    from kvxfer.kv.counts import Refusals, TransferCounts
    from kvxfer.kv.prefill_side import PrefillSide
    from kvxfer.kv.waiting import ExpectedOffers
    from kvxfer.ticket import Ticket

logger = logging.getLogger(__name__)


class MessageHandler:
    """The EngineHandler of an endpoint: called by the engine on the loop."""

    def __init__(
        self,
        identity: CurrentIdentity,
        connections: Connections,
        prefill_side: PrefillSide,
        expected_offers: ExpectedOffers,
        refusals: Refusals,
        counts: TransferCounts,
        clock: Clock,
    ) -> None:
        self._identity = identity
        self._connections = connections
        self._prefill_side = prefill_side
        self._expected_offers = expected_offers
        self._refusals = refusals
        self._counts = counts
        self._lost_offers = LostOffers(clock)
        connections.on_unreachable = self.cut_off

    def peer_up(self, peer: Peer) -> None:
        self._tell_of_lost_offers(self._connections.of(peer))

    def peer_lost(self, peer: Peer, error: KvxferError) -> None:
        connection = self._connections.get(peer)
        if connection is not None:
            logger.info("peer %s is lost: %s", peer.engine_id, error)
            self._counts.lost_peers[error.code] += 1
            self.drop(connection, error)

    def message(self, peer: Peer, data: bytes) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return  # disconnected while messages of it were on their way
        try:
            self._dispatch(connection, data)
        except ProtocolError as error:
            self._refusals.count("message", error)
            self.cut_off(connection, error)

    def _dispatch(self, connection: Connection, data: bytes) -> None:
        match decode(data):
            case Hello() as hello:
                connection.greet(hello)
            case Offer() as offer:
                self._on_offer(connection, offer)
            case Release() as release:
                self._on_release(connection, release)
            case Keep() as keep:
                self._on_keep(connection, keep)
            case Expect() as expect:
                self._on_expect(connection, expect)
            case Cancel(transfer_id, reason):
                self._on_cancel(connection, transfer_id, reason)
            # Below, a transfer that is unknown has ended here in the meantime.
            case Accepted(transfer_id):
                if inbound := connection.decodes.get(transfer_id):
                    inbound.accepted()
            case Refused(transfer_id, code, reason):
                if inbound := connection.decodes.get(transfer_id):
                    inbound.refused(_refusal(connection, transfer_id, code, reason))
            case Done() as done:
                if inbound := connection.decodes.get(done.transfer_id):
                    inbound.done(done)
            case Cancelled(transfer_id):
                if inbound := connection.decodes.get(transfer_id):
                    inbound.cancel_answered()

    def _on_offer(self, connection: Connection, offer: Offer) -> None:
        try:
            self._prefill_side.offer(connection, offer, self._verify(connection, offer, "offer"))
        except TransferError as error:
            logger.info("offer refused: %s", error)
            self._refusals.count("offer", error)
            self._prefill_side.offer_refused(connection, offer.transfer_id, error)
            with contextlib.suppress(EngineError):
                connection.send(Refused(offer.transfer_id, error.code, str(error)))

    def _on_release(self, connection: Connection, release: Release) -> None:
        try:
            ticket = self._verify(connection, release, "release")
            self._prefill_side.release(connection, ticket, release.reason)
        except TransferError as error:
            logger.info("release ignored: %s", error)
            self._refusals.count("release", error)

    def _on_keep(self, connection: Connection, keep: Keep) -> None:
        try:
            ticket = self._verify(connection, keep, "keep")
            self._prefill_side.keep(connection, ticket, keep.lease_seconds)
        except (TransferError, InvalidArgument) as error:
            logger.info("keep ignored: %s", error)
            self._refusals.count("keep", error)

    def _verify(self, connection: Connection, message: Offer | Release | Keep, what: str) -> Ticket:
        """Returns the ticket that a decode worker sent. Raises TicketInvalid and TicketExpired."""
        ticket = self._identity.verify(message.ticket)
        self._identity.require(ticket, Role.PREFILL)
        if ticket.transfer_id != message.transfer_id:
            raise TicketInvalid(
                f"the {what} of transfer {message.transfer_id} carries the ticket of transfer "
                f"{ticket.transfer_id}"
            )
        require_peer(ticket, Role.DECODE, connection.hello, f"the {what} is from")
        return ticket

    def _on_expect(self, connection: Connection, expect: Expect) -> None:
        hello = connection.hello
        try:
            ticket = self._identity.verify(expect.ticket)
            self._identity.require(ticket, Role.DECODE)
            require_peer(ticket, Role.PREFILL, hello, "an offer is expected by")
        except TransferError as error:
            logger.info("expected offer refused: %s", error)
            self._refusals.count("expect", error)
            with contextlib.suppress(EngineError):
                connection.send(Cancel(expect.transfer_id, str(error)))
        else:
            self._expected_offers.expect(ticket, connection)

    def _on_cancel(self, connection: Connection, transfer_id: str, reason: str) -> None:
        if inbound := connection.decodes.get(transfer_id):
            inbound.cancelled_by_peer(reason)
        else:
            self._expected_offers.cancel(connection, transfer_id, reason)
            self._prefill_side.cancel(connection, transfer_id, reason)

    def cut_off(self, connection: Connection, error: KvxferError) -> None:
        """Ends the connection to a peer that breaks the protocol or accepts no messages."""
        logger.warning("peer %s is cut off: %s", connection.peer.engine_id, error)
        with contextlib.suppress(EngineError):  # it may be lost already
            connection.peer.fence()
        self.drop(connection, error)

    def drop(self, connection: Connection, error: KvxferError) -> None:
        """Ends all transfers with a peer that is gone; no block of them stays in use."""
        self._connections.remove(connection, error)
        for inbound in list(connection.decodes.values()):
            if not inbound.answered:
                self._lost_offers.add(
                    connection.peer.engine_id, inbound.ticket, f"its OFFER was lost: {error}"
                )
            inbound.peer_lost(error)
        for other in self._connections:
            if other.peer.engine_id == connection.peer.engine_id:
                self._tell_of_lost_offers(other)
        self._expected_offers.drop(connection, error)
        self._prefill_side.drop(connection, error)

    def _tell_of_lost_offers(self, connection: Connection) -> None:
        for release in self._lost_offers.of(connection.peer.engine_id):
            with contextlib.suppress(EngineError):
                connection.send(release)


def _refusal(connection: Connection, transfer_id: str, code: str, reason: str) -> TransferError:
    """Returns the error that decode raises for a REFUSED: prefill's own if it is a TransferError
    and not a LayoutMismatch."""
    who = f"prefill worker {connection.hello.instance_id!r}"
    text = f"transfer {transfer_id}: refused by {who}: {reason}"
    kind = by_code(code)
    if issubclass(kind, TransferError) and kind is not LayoutMismatch:
        return kind(text)
    return TransferRefused(f"{text} ({code})")
