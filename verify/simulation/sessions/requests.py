"""Requests: a router sends them to both sides, and the workers of a fleet serve them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import BlockPoolExhausted, ChecksumMismatch, KvxferError, LeaseExpired
from kvxfer.instances import Role
from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.blocks import by_group
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.session_state import DecodeState, PrefillState
from kvxfer.ticket import Ticket

from .contents import Array
from .groups import take
from .oracle import Oracle
from .process import TRANSFER, Process
from .world import World

TAIL = b"tail"
_QUEUE_SECONDS = 0.02
_OVER = (
    PrefillState.DELIVERED,
    PrefillState.CANCELLED,
    DecodeState.COMPLETE,
    DecodeState.TAKEN,
    DecodeState.CANCELLED,
    DecodeState.FAILED,
)


@dataclass(eq=False)
class Request:
    """One request to a pair of instances, and its faults."""

    ticket: Ticket
    token: str
    prefill_addresses: list[str]
    decode_address: str
    tokens: int
    contents: Array
    lease_seconds: float
    brokered: bool = False
    fault: str = ""
    window: int = 1
    """The number of blocks that decode keeps of the layers with a sliding window."""
    by_offer: bool = False
    """True if prefill gets its ticket only from decode's OFFER."""
    parts: list[Part] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.ticket.transfer_id


@dataclass(eq=False)
class Part:
    """One rank's part of a request."""

    request: Request
    process: Process
    world: World
    oracle: Oracle
    ended: Callable[[Part], None]
    session: Any = None
    task: asyncio.Task[None] | None = None
    outcome: str = ""
    error: BaseException | None = None
    complete: bool = False
    """True if decode has every byte, right or wrong. Prefill need not learn what follows."""

    @property
    def side(self) -> Role:
        return self.process.instance.role

    @property
    def over(self) -> bool:
        """True if it has ended, or its session has."""
        session: PrefillSession | DecodeSession | None = self.session
        return bool(self.outcome) or session is None or session.state in _OVER

    def over_with(self, other: Part) -> bool:
        """Returns whether this rank needs nothing more from a rank of the other side."""
        if self.over or self.side is Role.PREFILL:
            return self.over
        return all(
            inbound.state in _OVER
            for inbound in self.session._inbounds
            if inbound.connection.peer.engine_id == other.process.incarnation
        )

    def linked_with(self, other: Part) -> bool:
        """Returns whether prefill has accepted the OFFER, or has told decode that it waits for it.
        From then on each side must learn of the other's end."""
        prefill, decode = (self, other) if self.side is Role.PREFILL else (other, self)
        if prefill.session is None or decode.session is None:
            return False
        pairs = (
            prefill.session._met
            if self.request.brokered
            else [outbound.connection for outbound in prefill.session._outbounds.values()]
        )
        return any(pair.peer.engine_id == decode.process.incarnation for pair in pairs)

    def begin(self) -> None:
        self.task = self.process.loop.create_task(self._serve())
        # A task that is cancelled before it runs reports nothing.
        self.task.add_done_callback(lambda _: self.outcome or self._ends("aborted"))

    async def _serve(self) -> None:
        TRANSFER.set(self.request.id)
        try:
            await (self._prefill() if self.side is Role.PREFILL else self._decode())
            self._ends("ok")
        except asyncio.CancelledError:
            self._ends("aborted")
        except KvxferError as error:
            self.error = error
            self._ends(type(error).__name__)

    def _ends(self, outcome: str) -> None:
        self.outcome = outcome
        self.ended(self)

    async def _pause(self, longest: float = 0.01) -> None:
        await asyncio.sleep(self.world.rng.choice([0.0, 1.0]) * self.world.rng.uniform(0, longest))

    async def _prefill(self) -> None:
        request, process, rng = self.request, self.process, self.world.rng
        endpoint = process.endpoint
        begun = False
        try:
            with await self._hold() as hold:
                token = await self._token()
                begun = True
                session = await endpoint.prefill_session(
                    token,
                    hold,
                    decode_address=request.decode_address if request.brokered else None,
                    lease_seconds=request.lease_seconds,
                )
                self._has(session)
                async with session:
                    table = by_group(hold.ids, process.cache.layout)
                    if rng.random() < 0.3:
                        hold.release()  # takes effect after the last read
                    await self._compute(session, table)
                    await session.finish(TAIL)
        except (asyncio.CancelledError, BlockPoolExhausted):
            if not begun and request.by_offer:
                process.offers.leave(request.id)
            elif not begun and rng.random() < 0.7:
                with contextlib.suppress(KvxferError):
                    endpoint.decline(request.token, "the request was aborted")
                self.world.counts["declined"] += 1
            raise

    async def _hold(self) -> Any:
        layout = self.process.cache.layout
        count = layout.blocks_for(self.request.tokens)
        window = self.request.window + self.world.rng.randint(0, 1)
        for attempt in range(11):
            try:
                return take(self.process.pool.hold, layout, count, window)
            except BlockPoolExhausted:
                if attempt == 10:
                    raise
            await asyncio.sleep(_QUEUE_SECONDS)
        raise AssertionError

    async def _token(self) -> str:
        """Returns the ticket of the request, or of decode's OFFER for it."""
        request = self.request
        if not request.by_offer:
            return request.token
        try:
            return await self.process.offers.of(request.id, request.lease_seconds)
        except TimeoutError:
            self.process.offers.leave(request.id)
            raise LeaseExpired(f"no offer was made for {request.id}") from None

    async def _compute(self, session: PrefillSession, table: BlockIds) -> None:
        """Writes the cache layer by layer, in one or two chunks of blocks."""
        rng, contents = self.world.rng, self.process.contents
        layers = range(self.process.cache.layout.layers_per_rank)
        blocks = table.shape[1]
        chunks = sorted({blocks, rng.randint(1, blocks)})
        begin = 0
        for end in chunks:
            for layer in layers:
                await self._pause()
                # Engines report every layer when it is computed, also to a failed session.
                if session.error is None:
                    contents.put(self.request.contents, layer, table, begin, end)
                session.write_layer(layer, end)
            begin = end

    async def _decode(self) -> None:
        request, process, rng = self.request, self.process, self.world.rng
        endpoint, layout = process.endpoint, process.cache.layout
        addresses = request.prefill_addresses
        blocks = layout.blocks_for(request.tokens)
        first = rng.choice([0, 0, rng.randrange(blocks)])
        if request.fault == "released" and not request.brokered:
            await self._pause(0.05)
            await endpoint.release(request.token, addresses, "its cache has the prompt")
            self.world.counts["released"] += 1
            raise asyncio.CancelledError
        if rng.random() < 0.2 and not request.brokered:
            await self._keep(addresses)
        session = await self._session(addresses, blocks - first, first)
        self._has(session)
        async with session:
            try:
                tail = await session.wait()
            except ChecksumMismatch:
                self.complete = True
                raise
            self.complete = True
            await self._pause()
            with session.take() as hold:
                ids = by_group(hold.ids, layout)
                self.world.require(tail == TAIL, f"{request.id} has the tail {tail!r}")
                for _ in range(2):
                    wrong = process.contents.differs(request.contents, ids, first)
                    where = f"{process.name} took {request.id}, whose bytes differ: {wrong}"
                    self.world.require(not wrong, where)
                    await self._pause(0.05)

    async def _keep(self, addresses: list[str]) -> None:
        await self.process.endpoint.keep(self.request.token, addresses)
        self.world.counts["kept"] += 1

    async def _session(self, addresses: list[str], blocks: int, first: int) -> DecodeSession:
        request, endpoint = self.request, self.process.endpoint
        layout = self.process.cache.layout
        for attempt in range(10):
            try:
                wanted: Any = blocks
                if layout.num_groups > 1:
                    wanted = take(self.process.pool.offer, layout, blocks, request.window)
                try:
                    return await endpoint.decode_session(
                        request.token,
                        None if request.brokered else addresses,
                        wanted,
                        first_block=first,
                        lease_seconds=request.lease_seconds,
                    )
                except BaseException:
                    if wanted is not blocks:
                        wanted.release()
                    raise
            except BlockPoolExhausted:
                if attempt == 9 and not request.brokered:
                    await endpoint.release(request.token, addresses, "there are no blocks")
                    self.world.counts["released"] += 1
                if attempt == 9 or request.brokered:
                    raise
                await self._keep(addresses)
                await asyncio.sleep(_QUEUE_SECONDS)
        raise AssertionError

    def _has(self, session: Any) -> None:
        self.session = session
        self.oracle.takes_part(self.process, self.request.id)
