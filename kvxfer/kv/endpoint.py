"""The KV endpoint of a worker: introduces it to its peers and starts its transfers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    TicketInvalid,
    TransferError,
    TransferRefused,
    by_code,
)
from kvxfer.instances import Role
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.messages import (
    Accepted,
    Cancel,
    Cancelled,
    Done,
    Hello,
    Offer,
    Refused,
    decode,
)
from kvxfer.kv.pair import KvPair, grant_ranges, hello_from
from kvxfer.kv.rendezvous import Rendezvous
from kvxfer.kv.transfer_ledger import TransferLedger
from kvxfer.ticket import Ticket, TicketKeys, verify_ticket
from kvxfer.watched_file import WatchedFile

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.engine import Engine, Peer
    from kvxfer.kv.block_pool import BlockHold, BlockPool
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.prefill_session import PrefillSession

logger = logging.getLogger(__name__)

DEFAULT_LEASE_SECONDS: Final = 60.0
MAX_EARLY_OFFERS_PER_PEER: Final = 256


class KvEndpoint:
    """One per worker process: the only user of an Engine's messages. Loop only.

    An async context manager. It knows every peer of the engine as a KvPair, verifies tickets
    (instance ids and epochs have to be its own and the sender's; each is good once), and brings
    offers and prefill requests together, whichever comes first. Peers learn its layout and MR
    descriptors from it alone, over the authenticated connection.

    `lease_seconds` is how long a side waits for the other where a session is not told otherwise.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KvCache,
        pool: BlockPool,
        *,
        instance_id: str,
        epoch: int,
        ticket_key: bytes | str | WatchedFile[TicketKeys],
        lease_seconds: float = DEFAULT_LEASE_SECONDS,
        connect_timeout: float = 2.0,
        max_early_offers_per_peer: int = MAX_EARLY_OFFERS_PER_PEER,
    ) -> None:
        if pool.num_blocks != cache.num_blocks:
            raise InvalidArgument(
                f"the pool has {pool.num_blocks} blocks, the cache {cache.num_blocks}; "
                "make both with the same number"
            )
        self.instance_id = instance_id
        self._engine = engine
        self._cache = cache
        self._pool = pool
        self._epoch = epoch
        self._ticket_key = (
            ticket_key if isinstance(ticket_key, WatchedFile) else as_cluster_key(ticket_key)
        )
        self._lease_seconds = lease_seconds
        self._connect_timeout = connect_timeout
        self._open = False
        self._pairs: dict[int, KvPair] = {}
        self._ledger = TransferLedger()
        self._rendezvous = Rendezvous(
            instance_id,
            cache.layout.layers_per_rank,
            self._ledger,
            max_early_offers_per_peer=max_early_offers_per_peer,
        )

    @property
    def epoch(self) -> int:
        """The epoch of this instance's registration; tickets of another one are refused."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Takes the epoch of a new registration and tells every peer. Running transfers go on."""
        self._epoch = epoch
        for pair in self._pairs.values():
            self._greet(pair)

    async def __aenter__(self) -> Self:
        self._engine.handler = self
        self._open = True
        for peer in self._engine.peers:
            self.peer_up(peer)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels every transfer and tells the peers; all blocks of sessions are free then."""
        if not self._open:
            return
        self._open = False
        reason = f"instance {self.instance_id!r} closes"
        for pair in self._pairs.values():
            for session in list(pair.decodes.values()):
                await session.cancel(reason)
        await self._rendezvous.close(reason)
        for pair in list(self._pairs.values()):
            self._drop(pair, EngineClosed(reason))
        self._engine.handler = None

    def side(self, ticket: str) -> Role | None:
        """The side that a ticket gives to this instance; None where it names others.

        Raises TicketInvalid and TicketExpired.
        """
        claims, this = self._verify(ticket), (self.instance_id, self._epoch)
        if this == (claims.prefill_id, claims.prefill_epoch):
            return Role.PREFILL
        return Role.DECODE if this == (claims.decode_id, claims.decode_epoch) else None

    async def prefill_session(
        self, ticket: str, blocks: BlockHold, *, lease_seconds: float | None = None
    ) -> PrefillSession:
        """Starts the prefill side of a transfer out of `blocks`, which it pins until it ends.

        Returns at once, whether or not the OFFER is here; without one the transfer ends with
        LeaseExpired. Raises TicketInvalid, TicketExpired, BlockStateError, and what ended the
        transfer if decode came first and is gone.
        """
        claims = self._verify(ticket)
        self._require_self("prefill", claims.prefill_id, claims.prefill_epoch, claims)
        lease = self._lease_seconds if lease_seconds is None else lease_seconds
        return await self._rendezvous.request(claims, blocks, lease)

    async def decode_session(
        self,
        ticket: str,
        prefill_address: str,
        num_blocks: int,
        *,
        lease_seconds: float | None = None,
    ) -> DecodeSession:
        """Offers `num_blocks` free blocks to the prefill worker at an engine address.

        Returns when the OFFER is sent. Raises TicketInvalid, TicketExpired, LayoutMismatch,
        BlockPoolExhausted, ConnectFailed, PeerRestarted and other EngineErrors of the connection,
        or DeadlineExceeded where no KV endpoint answers there.
        """
        claims = self._verify(ticket)
        self._require_self("decode", claims.decode_id, claims.decode_epoch, claims)
        pair = await self._meet(prefill_address)
        hello = pair.hello
        if (hello.instance_id, hello.epoch) != (claims.prefill_id, claims.prefill_epoch):
            raise TicketInvalid(
                f"the ticket of transfer {claims.transfer_id} names prefill worker "
                f"{claims.prefill_id!r} of epoch {claims.prefill_epoch}, at {prefill_address} is "
                f"{hello.instance_id!r} of epoch {hello.epoch}; ask for a new ticket"
            )
        # Raises LayoutMismatch, before any block is taken.
        _ = pair.inbound_plan
        self._require_open()
        with contextlib.ExitStack() as undo:
            blocks = undo.enter_context(self._pool.offer(num_blocks))
            counter = self._engine.counter(pair.peer)
            undo.callback(counter.release)
            grants = counter.grant(grant_ranges(self._cache, blocks.ids))
            # Last, so that a request which finds no free blocks may try again with its ticket.
            self._ledger.claim(claims, "decode session")
            session = DecodeSession(
                claims,
                ticket,
                pair,
                blocks,
                counter,
                grants,
                self._lease_seconds if lease_seconds is None else lease_seconds,
                self._decode_ended,
            )
            undo.pop_all()
        pair.decodes[claims.transfer_id] = session
        try:
            session.offer()
        except BaseException as error:
            await session.cancel(repr(error))
            raise
        return session

    # EngineHandler: called by the engine on the loop.

    def peer_up(self, peer: Peer) -> None:
        self._pair_of(peer)

    def peer_lost(self, peer: Peer, error: KvxferError) -> None:
        pair = self._pairs.get(peer.id)
        if pair is not None:
            logger.info("peer %s is lost: %s", peer.engine_id, error)
            self._drop(pair, error)

    def message(self, peer: Peer, data: bytes) -> None:
        pair = self._pairs.get(peer.id)
        if pair is None:
            return  # cut off, with messages of it still on their way
        try:
            self._dispatch(pair, data)
        except ProtocolError as error:
            logger.warning("peer %s is cut off: %s", peer.engine_id, error)
            with contextlib.suppress(EngineError):  # it may be lost already
                peer.fence()
            self._drop(pair, error)

    def _dispatch(self, pair: KvPair, data: bytes) -> None:
        match decode(data):
            case Hello() as hello:
                pair.greet(hello)
            case Offer() as offer:
                self._on_offer(pair, offer)
            case Cancel(transfer_id, reason):
                self._on_cancel(pair, transfer_id, reason)
            # Below, a transfer that is unknown has ended here in the meantime.
            case Accepted(transfer_id):
                if session := pair.decodes.get(transfer_id):
                    session.accepted()
            case Refused(transfer_id, code, reason):
                if session := pair.decodes.get(transfer_id):
                    session.refused(_refusal(pair, transfer_id, code, reason))
            case Done() as done:
                if session := pair.decodes.get(done.transfer_id):
                    session.done(done)
            case Cancelled(transfer_id):
                if session := pair.decodes.get(transfer_id):
                    session.cancel_answered()

    def _on_offer(self, pair: KvPair, offer: Offer) -> None:
        hello = pair.hello
        try:
            claims = self._verify(offer.ticket)
            self._require_self("prefill", claims.prefill_id, claims.prefill_epoch, claims)
            if claims.transfer_id != offer.transfer_id:
                raise TicketInvalid(
                    f"the offer of transfer {offer.transfer_id} carries the ticket of transfer "
                    f"{claims.transfer_id}"
                )
            if (hello.instance_id, hello.epoch) != (claims.decode_id, claims.decode_epoch):
                raise TicketInvalid(
                    f"the ticket of transfer {claims.transfer_id} names decode worker "
                    f"{claims.decode_id!r} of epoch {claims.decode_epoch}, the offer is from "
                    f"{hello.instance_id!r} of epoch {hello.epoch}; ask for a new ticket"
                )
            self._rendezvous.offer(pair, offer, claims)
        except TransferError as error:
            logger.info("offer refused: %s", error)
            with contextlib.suppress(EngineError):
                pair.send(Refused(offer.transfer_id, error.code, str(error)))

    def _on_cancel(self, pair: KvPair, transfer_id: str, reason: str) -> None:
        if session := pair.decodes.get(transfer_id):
            session.cancelled_by_peer(reason)
        else:
            self._rendezvous.cancel(pair, transfer_id, reason)

    def _decode_ended(self, session: DecodeSession) -> None:
        session.pair.decodes.pop(session.transfer_id, None)

    async def _meet(self, address: str) -> KvPair:
        peer = await self._engine.connect(address, timeout=self._connect_timeout)
        if not peer.alive:
            raise peer.error or PeerLost(f"the engine at {address} was lost while connecting to it")
        pair = self._pair_of(peer)
        try:
            await asyncio.wait_for(pair.greeted(), self._connect_timeout)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the engine at {address} did not introduce a KV cache within "
                f"{self._connect_timeout:g} s; does a KvEndpoint run there?"
            ) from None
        if pair.error is not None:
            raise pair.error
        return pair

    def _pair_of(self, peer: Peer) -> KvPair:
        pair = self._pairs.get(peer.id)
        if pair is None:
            pair = self._pairs[peer.id] = KvPair(peer, self._cache)
            self._greet(pair)
        return pair

    def _greet(self, pair: KvPair) -> None:
        # A peer that is lost by now is reported through peer_lost().
        with contextlib.suppress(EngineError):
            pair.send(hello_from(self._cache, instance_id=self.instance_id, epoch=self._epoch))

    def _drop(self, pair: KvPair, error: KvxferError) -> None:
        """Ends everything with a peer that is gone; no block of its transfers stays taken."""
        self._pairs.pop(pair.peer.id, None)
        pair.lose(error)
        for session in list(pair.decodes.values()):
            session.peer_lost(error)
        self._rendezvous.drop(pair, error)

    def _verify(self, token: str) -> Ticket:
        self._require_open()
        key = self._ticket_key
        return verify_ticket(token, key.current if isinstance(key, WatchedFile) else key)

    def _require_open(self) -> None:
        if not self._open:
            raise EngineClosed(
                f"the KV endpoint of instance {self.instance_id!r} is closed; "
                "use it inside `async with`"
            )

    def _require_self(self, role: str, instance_id: str, epoch: int, claims: Ticket) -> None:
        if (instance_id, epoch) != (self.instance_id, self._epoch):
            raise TicketInvalid(
                f"the ticket of transfer {claims.transfer_id} names {role} worker "
                f"{instance_id!r} of epoch {epoch}, this is {self.instance_id!r} of epoch "
                f"{self._epoch}; ask for a new ticket"
            )


def _refusal(pair: KvPair, transfer_id: str, code: str, reason: str) -> TransferError:
    """The error that decode raises for a REFUSED: prefill's own where it is about transfers."""
    text = f"transfer {transfer_id}: refused by prefill worker {pair.hello.instance_id!r}: {reason}"
    kind = by_code(code)
    if issubclass(kind, TransferError) and kind is not LayoutMismatch:
        return kind(text)
    return TransferRefused(f"{text} ({code})")
