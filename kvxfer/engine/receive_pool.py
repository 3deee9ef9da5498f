"""The receiving side of messages into registered slots. The sending side is RemotePool."""

from __future__ import annotations

import asyncio
import contextlib
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from kvxfer.engine.arguments import REFUSALS, Bytes, Slots, refused
from kvxfer.engine.callback import logger
from kvxfer.engine.pool_wire import HEADER_BYTES, Header, PoolOffer, SlotOffer, encode
from kvxfer.errors import EngineClosed, InvalidArgument, OutOfMemory, PeerError

if TYPE_CHECKING:
    from kvxfer.engine.counter import Counter
    from kvxfer.engine.engine import Engine
    from kvxfer.engine.peer import Peer


class Received:
    """A message in its slot. Use it as a context manager, or release() it: then the slot goes
    back to its sender, and `data` must not be used any more. Event loop only."""

    __slots__ = ("_give_back", "data", "peer")

    def __init__(self, peer: Peer, data: memoryview, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self.peer = peer
        self.data = data

    def release(self) -> None:
        """Gives the slot back. Idempotent; also allowed after the loss of the peer."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None
            with contextlib.suppress(BufferError):  # the caller still has views of it
                self.data.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()


@dataclass(slots=True, eq=False)
class _Loan:
    """One slot while it is lent to a peer."""

    index: int
    peer: Peer
    header: Counter
    payload: Counter
    messages: int = 0  # messages that have arrived whole
    immediates: int = 0  # immediates of their payloads
    credit: int = 0  # credit in the last one's header
    held: bool = False  # a message is in it, and was not released yet
    withdrawn: bool = False
    revoked: bool = False  # no write lands in the slot any more


class ReceivePool:
    """`slots` registered slots of `slot_bytes` that peers send into, without a copy.

        pool = ReceivePool(engine, slots=64, slot_bytes=1 << 20)
        peer.send(pool.offer(peer, slots=8))      # over there: RemotePool(peer, offer).send(...)
        async for received in pool:
            with received:
                consume(received.data)

    An offer is bytes that you send in a message. Slots go back to the sender as immediates, so a
    pool sends no messages, and does not interfere with message handlers or receive().
    Messages of one peer may overtake each other. Slots of a lost peer come back to the pool;
    messages that had arrived whole are still yielded. Event loop only.
    """

    def __init__(self, engine: Engine, slots: Slots, slot_bytes: Bytes) -> None:
        try:
            self._free = deque(range(slots))
            self._stride = HEADER_BYTES + -(-slot_bytes // HEADER_BYTES) * HEADER_BYTES
            if slots < 1 or slot_bytes < 1:
                raise InvalidArgument(f"a pool of {slots} slots of {slot_bytes} bytes")
            self._memory = engine.alloc(slots * self._stride)
        except REFUSALS as error:
            raise refused(error, ReceivePool.__init__, locals()) from None
        self._engine = engine
        self._view = memoryview(self._memory)
        self._loans: dict[Peer, list[_Loan]] = {}
        self._arrived: asyncio.Queue[Received | None] = asyncio.Queue()
        self._closed = False
        self._engine_closed = False
        self.slot_bytes = slot_bytes
        engine.on_close(self._end)

    @property
    def free(self) -> int:
        """Slots that are not lent."""
        return len(self._free)

    def offer(self, peer: Peer, slots: Slots) -> bytes:
        """Lends slots to a peer until it is lost or withdraw() is called. Send it the bytes.

        Raises OutOfMemory if fewer slots are free, EngineClosed, and the error of a lost peer.
        """
        if self._engine_closed:
            raise EngineClosed("the engine was closed")
        if self._closed:
            raise InvalidArgument("this pool was closed")
        try:
            if peer.engine is not self._engine:
                raise InvalidArgument(f"{peer!r} is a peer of another engine than the pool's")
            peer._require_connected()
            if operator.index(slots) < 1:
                raise InvalidArgument(f"{slots} slots for peer {peer.name!r}")
            if slots > len(self._free):
                raise OutOfMemory(
                    f"{slots} slots for peer {peer.name!r}; {len(self._free)} are free"
                )
        except REFUSALS as error:
            raise refused(error, ReceivePool.offer, locals()) from None
        loans: list[_Loan] = []
        with contextlib.ExitStack() as on_error:
            for index in list(self._free)[:slots]:
                header = self._engine.counter(peer)
                on_error.callback(header.release)
                payload = self._engine.counter(peer)
                on_error.callback(payload.release)
                loans.append(_Loan(index, peer, header, payload))
            on_error.pop_all()
        for loan in loans:
            self._free.popleft()
            for counter in (loan.header, loan.payload):
                counter.on_arrival(partial(self._look, loan))
        if peer not in self._loans:
            peer.on_lost(self.withdraw)
        self._loans.setdefault(peer, []).extend(loans)
        return encode(
            PoolOffer(
                self._memory.region.descriptor,
                self.slot_bytes,
                tuple(
                    SlotOffer(each.index * self._stride, each.header.imm, each.payload.imm)
                    for each in loans
                ),
            )
        )

    def withdraw(self, peer: Peer) -> None:
        """Takes back the slots of a peer: its offers are void, and no more messages come from it.
        A slot is free once the peer has answered and its message, if any, is released."""
        try:
            peer.forget_on_lost(self.withdraw)
        except AttributeError as error:
            raise refused(error, ReceivePool.withdraw, locals()) from None
        for loan in self._loans.pop(peer, ()):
            loan.withdrawn = True
            loan.header.revoke(partial(loan.payload.revoke, partial(self._revoked, loan)))

    def close(self) -> None:
        """Withdraws all slots, deregisters the memory and ends the iteration. Messages that have
        arrived are still yielded, and stay readable. Blocks briefly; idempotent."""
        self._engine.forget_on_close(self._end)
        if not self._closed:
            self._closed = True
            for peer in list(self._loans):
                self.withdraw(peer)
            self._memory.close()
            self._arrived.put_nowait(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        """Returns the next message. Raises EngineClosed if that ended the pool."""
        received = await self._arrived.get()
        if received is None:
            self._arrived.put_nowait(None)  # for the other waiters
            if self._engine_closed:
                raise EngineClosed("the engine was closed")
            raise StopAsyncIteration
        return received

    def _end(self) -> None:
        self._engine_closed = True
        self.close()

    def _look(self, loan: _Loan, _arrived: int) -> None:
        # One of the counters has grown; either may be the last to do so.
        headers = loan.header.value
        if loan.held or loan.withdrawn or headers == loan.messages:
            return
        start = loan.index * self._stride
        header = Header.unpack(self._view[start : start + HEADER_BYTES])
        due = loan.immediates + header.immediates
        arrived = loan.payload.value
        if (
            headers != loan.messages + 1
            or header.length > self.slot_bytes
            or (header.length == 0) != (header.immediates == 0)
            or arrived > due
        ):
            logger.error("peer %r breaks the rules of its receive slots: disconnecting", loan.peer)
            loan.peer.close()
            return
        if arrived < due:
            return
        loan.messages += 1
        loan.immediates = due
        loan.credit = header.credit
        loan.held = True
        payload = self._view[start + HEADER_BYTES : start + HEADER_BYTES + header.length]
        self._arrived.put_nowait(Received(loan.peer, payload, partial(self._give_back, loan)))

    def _revoked(self, loan: _Loan) -> None:
        loan.revoked = True
        if not loan.held:
            self._free.append(loan.index)

    def _give_back(self, loan: _Loan) -> None:
        if loan.withdrawn:
            loan.held = False
            if loan.revoked:
                self._free.append(loan.index)
            return
        # The peer may be lost: then the report of its loss frees the slot, as it is not held.
        with contextlib.suppress(PeerError, EngineClosed):
            loan.peer.write_imm(loan.credit)
        loan.held = False
