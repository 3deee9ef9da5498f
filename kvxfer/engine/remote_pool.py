"""The sending side of ReceivePool: sends into the slots that a peer has lent."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

from kvxfer.engine.arguments import REFUSALS, deadline, refused
from kvxfer.engine.operation_group import OperationGroup
from kvxfer.engine.pool_wire import HEADER_BYTES, Header, SlotOffer, decode
from kvxfer.errors import Backpressure, DeadlineExceeded, InvalidArgument, OutOfBounds

if TYPE_CHECKING:
    from kvxfer.engine.arguments import Length, Offer, Offset, Seconds
    from kvxfer.engine.counter import Counter
    from kvxfer.engine.memory import Region
    from kvxfer.engine.operation import Operation
    from kvxfer.engine.peer import Peer
    from kvxfer.engine.watcher import WatchFor


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot at the peer. It is free when the peer has given it back and no write into it is under
    way any more: a write may be repeated on another NIC until it has ended."""

    there: SlotOffer
    header_offset: int  # offset of its header in our memory
    credit: Counter  # counts how often the peer has given it back
    given_back: bool = True
    under_way: int = 0
    lost: bool = False


class RemotePool:
    """The slots of one offer of a peer. The loss of the peer closes it. Event loop only."""

    def __init__(self, peer: Peer, offer: Offer) -> None:
        """Takes `offer`, the bytes of the peer's ReceivePool.offer(). Raises InvalidArgument, the
        error of a lost peer, or OutOfMemory."""
        try:
            said = decode(offer)
            peer._require_connected()
        except REFUSALS as error:
            raise refused(error, RemotePool.__init__, locals()) from None
        self._peer = peer
        self._region = said.region
        self._closed = False
        self._slots: list[_Slot] = []
        with contextlib.ExitStack() as on_error:
            self._headers = peer.engine.alloc(max(len(said.slots), 1) * HEADER_BYTES)
            on_error.callback(self._headers.close)
            for n, there in enumerate(said.slots):
                credit = peer.engine.counter(peer)
                on_error.callback(credit.release)
                self._slots.append(_Slot(there, n * HEADER_BYTES, credit))
            on_error.pop_all()
        self._free = deque(self._slots)
        self._changed = asyncio.Event()  # a slot is free, or none will ever be
        self.slot_bytes = said.slot_bytes
        for slot in self._slots:
            slot.credit.on_arrival(partial(self._given_back, slot))
        peer.on_lost(self._peer_lost)

    @property
    def free(self) -> int:
        """The number of messages that may be sent now."""
        return len(self._free)

    def send(
        self,
        src: Region,
        length: Length,
        src_offset: Offset = 0,
        *,
        timeout: Seconds | None = None,
        after: WatchFor | None = None,
    ) -> OperationGroup:
        """Sends `length` bytes of `src` into a free slot, as one message, in two operations: the
        payload's and its header's.

        Raises Backpressure while no slot is free, OutOfBounds for more than slot_bytes, and as
        Peer.write does. A send that fails later costs its slot, until the peer withdraws it.
        """
        self._require_open()
        try:
            src.handle  # noqa: B018
            if not 0 <= length <= self.slot_bytes:
                raise OutOfBounds(f"length is {length}; the slots have {self.slot_bytes} bytes")
        except (TypeError, AttributeError) as error:
            raise refused(error, RemotePool.send, locals()) from None
        if not self._free:
            raise Backpressure(
                f"none of the {len(self._slots)} slots of peer {self._peer.name!r} is free"
            )
        slot = self._free[0]
        operations: list[Operation] = []
        if length > 0:
            operations.append(
                self._peer.write(
                    src,
                    self._region,
                    length=length,
                    src_offset=src_offset,
                    dst_offset=slot.there.offset + HEADER_BYTES,
                    imm=slot.there.payload_imm,
                    timeout=timeout,
                    after=after,
                )
            )
        self._free.popleft()
        if not self._free:
            self._changed.clear()
        header = Header(length, sum(each.immediates for each in operations), slot.credit.imm)
        at = slot.header_offset
        header.pack_into(memoryview(self._headers)[at : at + HEADER_BYTES])
        try:
            operations.append(
                self._peer.write(
                    self._headers.region,
                    self._region,
                    length=HEADER_BYTES,
                    src_offset=at,
                    dst_offset=slot.there.offset,
                    imm=slot.there.header_imm,
                    timeout=timeout,
                    after=after,
                )
            )
        except Exception:
            self._lose(slot)
            for operation in operations:
                operation.cancel()
            raise
        slot.given_back = False
        slot.under_way = len(operations)
        for operation in operations:
            operation.on_end(partial(self._ended, slot, operation))
        return OperationGroup(operations)

    async def available(self, timeout: Seconds | None = None) -> None:
        """Returns once a slot is free. Raises DeadlineExceeded after `timeout` seconds,
        Backpressure if failed sends have cost all slots, or the peer's error."""
        try:
            async with deadline(timeout):
                while not self._free:
                    self._require_open()
                    if all(slot.lost for slot in self._slots):
                        raise Backpressure(
                            f"failed sends have cost all slots of peer {self._peer.name!r}; "
                            "it has to withdraw them and make a new offer"
                        )
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no slot of peer {self._peer.name!r} was free within {timeout} s"
            ) from None
        self._require_open()

    def close(self) -> None:
        """Gives back the counters and the memory of the headers; sends under way are cancelled.
        The slots stay lent until the peer withdraws them. Blocks briefly; idempotent."""
        if self._closed:
            return
        self._closed = True
        self._peer.forget_on_lost(self._peer_lost)
        self._free.clear()
        for slot in self._slots:
            slot.credit.revoke(lambda: None)
        self._headers.close()
        self._changed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _require_open(self) -> None:
        self._peer._require_connected()
        if self._closed:
            raise InvalidArgument("this remote pool was closed")

    def _peer_lost(self, _peer: Peer) -> None:
        self.close()

    def _given_back(self, slot: _Slot, _times: int) -> None:
        if not slot.given_back:
            slot.given_back = True
            self._free_if_unused(slot)

    def _ended(self, slot: _Slot, operation: Operation) -> None:
        slot.under_way -= 1
        if operation.error is not None:
            self._lose(slot)
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: _Slot) -> None:
        if slot.given_back and not slot.under_way and not slot.lost and not self._closed:
            self._free.append(slot)
            self._changed.set()

    def _lose(self, slot: _Slot) -> None:
        # An unknown part of the message arrives, so the slot's counters at the peer are useless.
        slot.lost = True
        if all(each.lost for each in self._slots):
            self._changed.set()
