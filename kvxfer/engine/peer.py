"""A connected engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvxfer.engine.arguments import REFUSALS, deadline, refused, require_callable
from kvxfer.engine.callback import tell
from kvxfer.engine.native import translated
from kvxfer.engine.operation import Operation
from kvxfer.errors import DeadlineExceeded, EngineError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvxfer._native import TransferEngine
    from kvxfer.engine.arguments import (
        Descriptor,
        Imm,
        Integers,
        Length,
        Nic,
        Offset,
        Seconds,
        Stride,
    )
    from kvxfer.engine.counter import Counter
    from kvxfer.engine.memory import Memory, Region
    from kvxfer.engine.watcher import WatchFor


class PeerEngine(Protocol):
    """The part of an Engine that its peers use, and the objects made from them."""

    native: TransferEngine

    def _track(self, operation: Operation) -> Operation:
        """Registers an accepted operation, so that it learns of its end. Any thread."""

    def alloc(self, nbytes: int) -> Memory: ...

    def counter(self, peer: Peer) -> Counter: ...


class Peer:
    """One connection to one peer engine.

    id: the number of this connection, never reused. engine_id: 32 hex digits, new at every start of
    the peer. fabric: one of FABRICS. A lost peer stays lost: connecting again gives a new Peer.
    Everything except receive(), on_lost() and forget_on_lost() may be called from any thread.
    """

    __slots__ = ("_inbox", "_on_lost", "engine", "engine_id", "error", "fabric", "id", "name")

    def __init__(
        self, engine: PeerEngine, peer_id: int, engine_id: str, name: str, fabric: str
    ) -> None:
        self.engine = engine
        self._on_lost: list[Callable[[Peer], object]] = []
        self._inbox: asyncio.Queue[bytes | EngineError] = asyncio.Queue()
        self.id = peer_id
        self.engine_id = engine_id
        self.name = name
        self.fabric = fabric
        self.error: EngineError | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection is up; if not, `error` says why."""
        return self.error is None

    def write(
        self,
        src: Region,
        dst: Descriptor,
        *,
        length: Length,
        src_offset: Offset = 0,
        dst_offset: Offset = 0,
        imm: Imm | None = None,
        timeout: Seconds | None = None,
        nic: Nic | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Writes `length` contiguous bytes into the peer's region `dst` (a descriptor).

        imm: the immediate that the receiver counts, `immediates` times in all; a grant needs that
        of its counter. timeout: seconds until the operation fails with DeadlineExceeded; the
        engine's operation_timeout by default. nic: the only one of engine.nics to use. after:
        watcher.at(value), to hold the write back until the watcher has reached the value. Raises
        OutOfBounds, UnknownRegion, Backpressure, EngineClosed, or the error of a lost peer.
        """
        self._require_connected()
        try:
            submitted = self.engine.native.write(
                self.id,
                src.handle,
                dst,
                source_offset=src_offset,
                destination_offset=dst_offset,
                length=length,
                imm=imm,
                timeout=timeout,
                nic=nic,
                after=after,
            )
        except REFUSALS as error:
            raise refused(error, Peer.write, locals()) from None
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_pages(
        self,
        src: Region,
        dst: Descriptor,
        *,
        page_length: Length,
        src_pages: Integers,
        dst_pages: Integers,
        src_stride: Stride | None = None,
        dst_stride: Stride | None = None,
        src_offset: Offset = 0,
        dst_offset: Offset = 0,
        imm: Imm | None = None,
        timeout: Seconds | None = None,
        nic: Nic | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Writes pages: page i moves `page_length` bytes from src_offset + src_pages[i] *
        src_stride to dst_offset + dst_pages[i] * dst_stride.

        src_pages, dst_pages: equally many integers, as a sequence, or as a one-dimensional array
        or tensor; an array of int64 is not copied. src_stride, dst_stride: page_length by default.
        Use one call for all pages of a layer: it enters native code once, even for 100,000 pages.
        See write() for the rest.
        """
        self._require_connected()
        try:
            submitted = self.engine.native.write_pages(
                self.id,
                src.handle,
                dst,
                page_length=page_length,
                source_pages=src_pages,
                destination_pages=dst_pages,
                source_stride=page_length if src_stride is None else src_stride,
                destination_stride=page_length if dst_stride is None else dst_stride,
                source_offset=src_offset,
                destination_offset=dst_offset,
                imm=imm,
                timeout=timeout,
                nic=nic,
                after=after,
            )
        except REFUSALS as error:
            raise refused(error, Peer.write_pages, locals()) from None
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_list(
        self,
        src: Sequence[Region],
        dst: Sequence[Descriptor],
        *,
        src_offsets: Integers,
        dst_offsets: Integers,
        lengths: Integers,
        imm: Imm | None = None,
        timeout: Seconds | None = None,
        nic: Nic | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Submits many writes as one operation with one total: lengths[i] bytes from src_offsets[i]
        of the region src[i] to dst_offsets[i] of the region dst[i] (a descriptor).

        src_offsets, dst_offsets, lengths: as many integers as there are regions, in the forms of
        write_pages(). All are submitted, or none. See write() for the rest.
        """
        self._require_connected()
        try:
            submitted = self.engine.native.write_list(
                self.id,
                [region.handle for region in src],
                dst,
                source_offsets=src_offsets,
                destination_offsets=dst_offsets,
                lengths=lengths,
                imm=imm,
                timeout=timeout,
                nic=nic,
                after=after,
            )
        except REFUSALS as error:
            raise refused(error, Peer.write_list, locals()) from None
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_imm(
        self,
        imm: Imm,
        *,
        timeout: Seconds | None = None,
        nic: Nic | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Counts one at the receiver, without any bytes."""
        self._require_connected()
        try:
            submitted = self.engine.native.write_imm(
                self.id, imm, timeout=timeout, nic=nic, after=after
            )
        except REFUSALS as error:
            raise refused(error, Peer.write_imm, locals()) from None
        return self.engine._track(Operation(self.engine.native, *submitted))

    def send(self, data: Buffer) -> None:
        """Sends a message of at most 1 MiB: ordered among messages, not among writes. A message is
        lost only if the peer is lost. Raises Backpressure while 16 MiB wait."""
        self._require_connected()
        try:
            self.engine.native.send(
                self.id, data if isinstance(data, bytes) else bytes(memoryview(data))
            )
        except REFUSALS as error:
            raise refused(error, Peer.send, locals()) from None

    async def receive(self, timeout: Seconds | None = None) -> bytes:
        """Returns the next message. If the engine has a handler, messages go only there.

        Raises the peer's error once it is lost, DeadlineExceeded after `timeout` seconds.
        """
        if self.error is not None and self._inbox.empty():
            raise self.error
        try:
            async with deadline(timeout):
                item = await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message from peer {self.name!r} within {timeout} s"
            ) from None
        if isinstance(item, EngineError):
            self._inbox.put_nowait(item)  # for the other waiters
            raise item
        return item

    def on_lost(self, callback: Callable[[Peer], object]) -> None:
        """Calls back with this peer when it is lost, or now if it is; `error` says why. The call
        comes before that of the engine's handler."""
        require_callable("callback", callback)
        if self.error is not None:
            tell(callback, self)
        else:
            self._on_lost.append(callback)

    def forget_on_lost(self, callback: Callable[[Peer], object]) -> None:
        """Removes a callback of on_lost()."""
        require_callable("callback", callback)
        if callback in self._on_lost:
            self._on_lost.remove(callback)

    def fence(self) -> None:
        """Ends the connection: afterwards no write of the peer lands here. The peer is lost to this
        engine."""
        with translated():
            self.engine.native.fence(self.id)

    def close(self) -> None:
        """Disconnects; operations under way end with PeerLost. Idempotent."""
        self.engine.native.disconnect(self.id)

    def _deliver(self, data: bytes) -> None:
        """Takes the engine's report of a message. Event loop only."""
        self._inbox.put_nowait(data)

    def _lose(self, error: EngineError) -> None:
        """Takes the engine's report that the peer is lost. Event loop only."""
        self.error = error
        self._inbox.put_nowait(error)
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            tell(callback, self)

    def _require_connected(self) -> None:
        """Raises the error of a lost peer."""
        # Until the loss is reported, the native engine knows no more than PeerLost.
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, engine {self.engine_id[:8]}, {self.fabric})"
