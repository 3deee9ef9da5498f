"""The KV endpoint of a worker: introduces it to its peers and starts its transfers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvxfer.errors import (
    EngineClosed,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    TicketInvalid,
)
from kvxfer.instances import Role
from kvxfer.kv.admission import CurrentIdentity, Side, TransferLedger
from kvxfer.kv.brokered import Brokered
from kvxfer.kv.connection import Connection, grant_ranges
from kvxfer.kv.connections import Connections, follow_first_rank
from kvxfer.kv.counts import Refusals, TrafficMeter, TransferCounts
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.inbound import Inbound
from kvxfer.kv.message_handler import MessageHandler
from kvxfer.kv.messages import Keep, Release
from kvxfer.kv.opening import opens
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.kv.prefill_side import PrefillSide
from kvxfer.kv.ranks import sources, targets
from kvxfer.kv.waiting import ExpectedOffers
from kvxfer.tracing.span import child

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvxfer.engine import Engine, Peer
    from kvxfer.instances import Traffic
    from kvxfer.kv.block_pool import BlockPool, BlockState
    from kvxfer.kv.blocks import SourceBlocks, TargetBlocks
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.counts import Direction
    from kvxfer.kv.prefill_session import PrefillSession
    from kvxfer.layout import KvLayout
    from kvxfer.model_identity import ModelIdentity
    from kvxfer.ticket import Ticket
    from kvxfer.tracing.span import Span

_DEFAULTS: Final = KvOptions()
_LEAST_LEASE_SECONDS: Final = 0.001


class KvEndpoint:
    """The KV side of a worker process, and the only user of its Engine's messages. Loop only.

    An async context manager. It has a Connection to every peer of the engine, verifies tickets
    (instance ids and epochs have to be its own and the sender's; each is valid once), and matches
    offers with prefill requests, whichever comes first. Only the endpoint gives peers its layout
    and MR descriptors, over the authenticated connection.

    `pool` gives blocks to decode sessions; without it the caller passes the blocks of a session.

    The side that has the other's address connects. By default decode does (the direct handshake).
    In the brokered handshake prefill does, and the block table goes through the control plane of
    `options`. Both sides of a transfer have to use the same handshake.
    """

    def __init__(
        self,
        engine: Engine,
        cache: KvCache,
        pool: BlockPool | None,
        identity: KvIdentity,
        options: KvOptions = _DEFAULTS,
    ) -> None:
        if pool is not None and pool.num_blocks != cache.num_blocks:
            raise InvalidArgument(
                f"the pool has {pool.num_blocks} blocks, the cache {cache.num_blocks}; "
                "make both with the same number"
            )
        if options.checksums:
            cache.require_host_memory("checksums need host memory; pass checksums=False")
        self.clock = clock = options.clock
        self._identity = CurrentIdentity(identity, clock)
        self._engine = engine
        self._cache = cache
        self._pool = pool
        self._lease_seconds = options.lease_seconds
        self._open = False
        self._tracer = options.tracer
        self._connections = Connections(
            engine,
            cache,
            self._identity,
            options.connect_timeout,
            checksums=options.checksums,
            clock=clock,
        )
        self._ledger = TransferLedger(clock)
        self._refusals = Refusals()
        self._traffic = TrafficMeter(clock=clock)
        self.counts = TransferCounts()
        """The transfers of this endpoint that ended since the start."""
        self._decodes: dict[DecodeSession, None] = {}  # in the order in which they began
        self._prefill_side = PrefillSide(
            identity.instance_id,
            cache.layout,
            self._ledger,
            max_early_offers_per_peer=options.max_early_offers_per_peer,
            ended=self._prefill_ended,
            refusals=self._refusals,
            loss_of_decode=self._connections.loss_of_decode,
            on_offer=options.on_offer,
            clock=clock,
        )
        self._expected_offers = ExpectedOffers(clock)
        self._handler = MessageHandler(
            self._identity,
            self._connections,
            self._prefill_side,
            self._expected_offers,
            self._refusals,
            self.counts,
            clock,
        )
        self._brokered = Brokered(
            options.control_plane, self._identity, self._connections, self._prefill_side, clock
        )

    @property
    def instance_id(self) -> str:
        return self._identity.instance_id

    @property
    def epoch(self) -> int:
        """The epoch of this instance's registration; tickets of other epochs are refused."""
        return self._identity.epoch

    @property
    def layout(self) -> KvLayout:
        """The layout of the cache."""
        return self._cache.layout

    @property
    def model(self) -> ModelIdentity | None:
        """The model of the cache."""
        return self._identity.model

    def refusals(self) -> dict[str, dict[str, int]]:
        """Returns the number of refusals since the start, by kind and error code: "message" (of
        peers that were disconnected for it), "offer", "release", "keep" and "expect" of peers, and
        "ticket" of requests."""
        return self._refusals.by_what()

    def traffic(self) -> tuple[Traffic, ...]:
        """Returns the current traffic to each decode worker, for `Load.sent`."""
        return self._traffic.rates(self._prefill_side.sessions)

    def running(self) -> dict[Direction, int]:
        """Returns the number of transfers that have begun and not ended."""
        return {"send": len(self._prefill_side), "receive": len(self._decodes)}

    def blocks(self) -> dict[BlockState, int]:
        """Returns the number of blocks of the pool in each state; empty without a pool."""
        return {} if self._pool is None else self._pool.counts()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of a new registration and tells every peer. Running transfers continue."""
        self._identity.epoch = epoch
        self._connections.greet_all()

    async def set_model(self, model: ModelIdentity) -> None:
        """Sets the model after an update of its weights, and tells every peer. Cancels all
        transfers of the old model, including prompts that prefill keeps to be fetched, and returns
        when none is left."""
        if model == self._identity.model:
            return
        self._identity.model = model
        self._connections.greet_all()
        reason = f"the weights of {self.instance_id!r} were updated"
        await asyncio.gather(*(session.cancel(reason) for session in list(self._decodes)))
        await self._prefill_side.close(reason)

    @property
    def suspended(self) -> bool:
        """Whether the cache has no memory."""
        return bool(self._identity.suspended)

    async def suspend(self, reason: str) -> None:
        """Prepares for the loss of the cache's memory: cancels every transfer and tells the peers,
        then closes the cache's registrations. Returns when nothing reads or writes the memory.
        Until resume(), transfers are refused with this reason."""
        self._identity.suspended = reason
        await asyncio.gather(*(session.cancel(reason) for session in list(self._decodes)))
        await self._prefill_side.close(reason)
        await asyncio.to_thread(self._cache.suspend)

    async def resume(self) -> None:
        """Registers the memory again, at the same addresses. Raises as Engine.register() does."""
        await asyncio.to_thread(self._cache.resume)
        self._identity.suspended = ""

    async def follow(self, address: str) -> Peer:
        """Takes the epoch from the first rank of this instance, which registers it and whose engine
        is at `address`, and each later one while the connection lasts. Returns when it has one.

        Raises as decode_session() does for the connection, InvalidArgument if another instance is
        there, and DeadlineExceeded if the first rank is not registered within a minute.
        """
        return await follow_first_rank(self._connections, self._identity, address, self.set_epoch)

    async def __aenter__(self) -> Self:
        self._engine.handler = self._handler
        self._open = True
        for peer in self._engine.peers:
            self._handler.peer_up(peer)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels every transfer and tells the peers. Afterwards all blocks of sessions are
        free."""
        if not self._open:
            return
        self._open = False
        reason = f"instance {self.instance_id!r} closes"
        self._expected_offers.close(EngineClosed(reason))
        await asyncio.gather(*(session.cancel(reason) for session in list(self._decodes)))
        await self._prefill_side.close(reason)
        for connection in self._connections:
            self._handler.drop(connection, EngineClosed(reason))
        self._engine.handler = None

    def side(self, ticket: str) -> Role | None:
        """Returns the side that a ticket gives to this instance; None if it names others.

        Raises TicketInvalid and TicketExpired.
        """
        return self._identity.side(self._verify(ticket))

    @opens
    async def prefill_session(
        self,
        ticket: str,
        blocks: SourceBlocks,
        *,
        adapter: str = "",
        decode_address: str | None = None,
        lease_seconds: float | None = None,
    ) -> PrefillSession:
        """Starts the prefill side of a transfer from `blocks`, which it pins until it ends: enter
        it with `async with`, or await it and leave it yourself.

        `adapter` is the digest of the LoRA that the blocks were computed with; an OFFER with
        another one is refused.

        Returns at once, whether or not the OFFER has come; without one the transfer ends with
        LeaseExpired. With `decode_address`, the engine of decode, the handshake is brokered: the
        session connects there and fetches the OFFER from the control plane. If that fails, also
        with an error of `kvxfer.client`, the error is the transfer's.

        Raises TicketInvalid, TicketExpired, BlockStateError, TransferRefused while suspended, and
        the error that ended the transfer if decode came first and is gone, or was lost after the
        ticket was issued.
        """
        claims = self._verify_for(Role.PREFILL, ticket)
        self._identity.require_memory()
        if decode_address is not None:
            self._brokered.require()
        lease = self._lease_seconds if lease_seconds is None else lease_seconds
        span = self._span("kv.send", claims)
        with self._noting_failure("send", span):
            session = await self._prefill_side.request(
                claims,
                blocks,
                lease,
                dials=decode_address is not None,
                adapter=adapter,
                span=span,
            )
        if decode_address is not None:
            self._brokered.fetch(session, claims, decode_address)
        return session

    def decline(self, ticket: str, reason: str) -> None:
        """Ends a transfer whose prefill request ended before its session began, and tells decode at
        once. Raises TicketInvalid and TicketExpired."""
        claims = self._verify_for(Role.PREFILL, ticket)
        self._prefill_side.decline(claims, reason)

    @opens
    async def decode_session(
        self,
        ticket: str,
        prefill_address: str | Sequence[str] | None,
        blocks: int | TargetBlocks,
        *,
        first_block: int = 0,
        prompt_digest: bytes = b"",
        adapter: str = "",
        lease_seconds: float | None = None,
    ) -> DecodeSession:
        """Offers blocks to the prefill worker at an engine address: a number of free blocks of the
        pool, or blocks that an engine has allocated itself. Enter it with `async with`, or await it
        and leave it yourself.

        If the prefill worker has several ranks, pass all their addresses in the order of its ranks
        (KvLayout.rank); those that have a part of these blocks get an OFFER. Every rank of this
        worker does the same with its endpoint, under one ticket.

        The blocks are for the prompt from its block `first_block` on: decode already has those
        before it, and prefill leaves them out. A ticket that names another prompt than
        `prompt_digest`, or another LoRA than that of the digest `adapter`, is refused, and stays
        valid for its own.

        Returns when the OFFER is sent. Without an address the handshake is brokered: it waits until
        prefill has connected here and expects the OFFER, then takes the blocks, and leaves the
        OFFER at the control plane while the session begins.

        Raises TicketInvalid, TicketExpired, LayoutMismatch, BlockPoolExhausted, TransferRefused
        while suspended, and InvalidArgument if the processor would have to check or reorder blocks
        in memory of a GPU. With an address, raises InvalidArgument if a rank's address is missing
        or belongs to another rank, ConnectFailed, PeerRestarted and other EngineErrors of the
        connection, or DeadlineExceeded if no KV endpoint answers there. Without one, raises
        LeaseExpired if prefill does not come, and TransferCancelled or PeerLost if it has already
        cancelled or is gone.
        """
        claims = self._verify_for(Role.DECODE, ticket)
        if prompt_digest and claims.prompt_digest and prompt_digest != claims.prompt_digest:
            raise TicketInvalid(
                f"the ticket of transfer {claims.transfer_id} is for another prompt; send the "
                "same request to both workers"
            )
        if claims.adapter and claims.adapter != adapter:
            raise LayoutMismatch("adapter", claims.adapter, adapter)
        lease = self._lease_seconds if lease_seconds is None else lease_seconds
        span = self._span("kv.receive", claims)
        with self._noting_failure("receive", span):
            if prefill_address is None:
                self._brokered.require()
                begun = self.clock.monotonic()
                connection = await self._expected_offers.prefill_of(claims, lease)
                self._require_alone(connection)
                connections: tuple[Connection, ...] = (connection,)
                lease = max(lease - (self.clock.monotonic() - begun), _LEAST_LEASE_SECONDS)
            else:
                connections = await self._connections.meet_sources(claims, prefill_address)
            session = self._begin(claims, connections, blocks, first_block, adapter, lease, span)
        try:
            if prefill_address is None:
                self._brokered.publish(session, claims)
            else:
                session._offer()
        except BaseException as error:
            await session.cancel(repr(error))
            raise
        return session

    async def release(self, ticket: str, prefill_address: str | Sequence[str], reason: str) -> None:
        """Tells prefill that this decode worker will not offer anything under a ticket, so that it
        frees the blocks at once. A transfer that has begun continues.

        Raises TicketInvalid, TicketExpired, and as decode_session() does for the connection.
        """
        claims = self._verify_for(Role.DECODE, ticket)
        for connection in await self._connections.meet_sources(claims, prefill_address):
            connection.send(Release(claims.transfer_id, ticket, reason))

    async def keep(self, ticket: str, prefill_address: str | Sequence[str]) -> None:
        """Tells prefill that a request waits here for free blocks. Prefill keeps its blocks for a
        lease of this endpoint from now, at most until the ticket expires, and frees them if this
        worker is lost. Raises as release() does.
        """
        claims = self._verify_for(Role.DECODE, ticket)
        for connection in await self._connections.meet_sources(claims, prefill_address):
            connection.send(Keep(claims.transfer_id, ticket, self._lease_seconds))

    def _begin(
        self,
        ticket: Ticket,
        connections: Sequence[Connection],
        wanted: int | TargetBlocks,
        first_block: int,
        adapter: str,
        lease_seconds: float,
        span: Span | None,
    ) -> DecodeSession:
        """Returns a session that has its blocks and has not offered them yet."""
        self._require_open()
        if first_block < 0:
            raise InvalidArgument(f"first_block is {first_block}; pass 0 or more")
        for connection in connections:
            connection.require_same_model(Role.DECODE)
            connection.require_touchable(Role.DECODE)
        with contextlib.ExitStack() as undo:
            blocks = self._blocks(wanted)
            undo.callback(blocks.release)
            ranges = [
                grant_ranges(self._cache, connection.inbound_plan, blocks.ids)
                for connection in connections
            ]
            # Claimed after the blocks, so that a request that finds none may try again with its
            # ticket; and before the counters, whose release has to ask their writers first.
            self._ledger.claim(ticket, "decode session")
            inbounds = []
            for connection, granted in zip(connections, ranges, strict=True):
                counter = self._engine.counter(connection.peer)
                undo.callback(counter.release)
                grants = counter.grant(granted)
                inbounds.append(Inbound(connection, ticket.transfer_id, counter, grants))
            session = DecodeSession(
                ticket,
                self._cache,
                blocks,
                inbounds,
                first_block,
                lease_seconds,
                self._decode_ended,
                span,
                adapter=adapter,
                clock=self.clock,
            )
            undo.pop_all()
        self._decodes[session] = None
        return session

    def _blocks(self, wanted: int | TargetBlocks) -> TargetBlocks:
        if not isinstance(wanted, int):
            return wanted
        if self._pool is None:
            raise InvalidArgument(
                f"an endpoint without a pool cannot give {wanted} free blocks; pass the blocks"
            )
        return self._pool.offer(wanted)

    def _require_alone(self, connection: Connection) -> None:
        """Raises InvalidArgument if a transfer with this peer takes more than two ranks."""
        ours, theirs = self._cache.layout, connection.hello.layout
        if sources(theirs, ours) != (theirs.rank,) or targets(theirs, ours) != (ours.rank,):
            raise InvalidArgument(
                f"rank {ours.rank} of {self.instance_id!r} and rank {theirs.rank} of "
                f"{connection.hello.instance_id!r} transfer to other ranks too, which a brokered "
                "handshake does not allow; use the direct one"
            )

    def _decode_ended(self, session: DecodeSession) -> None:
        self._decodes.pop(session, None)
        self._brokered.ended(session)
        self.counts.checked_bytes += session.checked_bytes
        self._count("receive", session)

    def _prefill_ended(self, session: PrefillSession) -> None:
        self._traffic.end(session)
        self._brokered.ended(session)
        self._count("send", session)

    def _count(self, direction: Direction, session: DecodeSession | PrefillSession) -> None:
        if session.error is not None:
            self.counts.failed(direction, session.error)
        else:
            seconds = self.clock.monotonic() - session.begun
            self.counts.delivered(direction, session.fabric or "", session.nbytes, seconds)

    def _span(self, name: str, claims: Ticket) -> Span | None:
        """Returns the span of a transfer that its task or its ticket traces; None otherwise."""
        ids = {"request_id": claims.request_id, "transfer_id": claims.transfer_id}
        span = child(name, **ids)
        if span is None and self._tracer is not None and claims.traceparent:
            span = self._tracer.join(name, claims.traceparent, **ids)
        return span

    @contextlib.contextmanager
    def _noting_failure(self, direction: Direction, span: Span | None) -> Iterator[None]:
        """Counts a transfer that fails before there is a session."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, KvxferError):
                self.counts.failed(direction, error)
            if span is not None:
                span.end(error)
            raise

    def _verify_for(self, side: Side, token: str) -> Ticket:
        return self._verify(token, side)

    def _verify(self, token: str, side: Side | None = None) -> Ticket:
        self._require_open()
        try:
            claims = self._identity.verify(token)
            if side is not None:
                self._identity.require(claims, side)
        except TicketInvalid as error:
            self._refusals.count("ticket", error)
            raise
        return claims

    def _require_open(self) -> None:
        if not self._open:
            raise EngineClosed(
                f"the KV endpoint of instance {self.instance_id!r} is closed; "
                "use it inside `async with`"
            )
