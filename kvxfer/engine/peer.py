"""A connected engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvxfer.engine.callback import tell
from kvxfer.engine.integers import buffer_of
from kvxfer.engine.native import translated
from kvxfer.engine.operation import Operation
from kvxfer.errors import DeadlineExceeded, PeerError

if TYPE_CHECKING:
    from kvxfer._native import TransferEngine
    from kvxfer.engine.counter import Counter
    from kvxfer.engine.integers import Integers
    from kvxfer.engine.memory import Memory, MemoryRegion
    from kvxfer.engine.watcher import WatchFor


class PeerEngine(Protocol):
    """What peers, and what is made of them, ask of the Engine that they are connected to."""

    native: TransferEngine

    def _track(self, operation: Operation) -> Operation:
        """Tells an operation that the native engine has taken when it has ended. Any thread."""

    def alloc(self, nbytes: int) -> Memory: ...

    def counter(self, peer: Peer) -> Counter: ...


class Peer:
    """One connection to one peer engine.

    id: of this connection, never reused. engine_id: 32 hex digits, new at every start of the
    peer. fabric: one of FABRICS. A lost peer stays lost: connecting again gives a new Peer.
    Everything but receive() and the on_lost() pair may be called from any thread.
    """

    __slots__ = ("_inbox", "_on_lost", "engine", "engine_id", "error", "fabric", "id", "name")

    def __init__(
        self, engine: PeerEngine, peer_id: int, engine_id: str, name: str, fabric: str
    ) -> None:
        self.engine = engine
        self._on_lost: list[Callable[[Peer], object]] = []
        self._inbox: asyncio.Queue[bytes | PeerError] = asyncio.Queue()
        self.id = peer_id
        self.engine_id = engine_id
        self.name = name
        self.fabric = fabric
        self.error: PeerError | None = None

    @property
    def alive(self) -> bool:
        """Whether the connection stands; where not, `error` says why."""
        return self.error is None

    def write(
        self,
        src: MemoryRegion,
        dst: bytes,
        *,
        length: int,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: int | None = None,
        timeout: float | None = None,
        nic: int | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Writes `length` contiguous bytes into the peer's region `dst` (a descriptor).

        imm: counts at the receiver, `immediates` times in all. timeout: seconds until the
        operation fails with DeadlineExceeded; the engine's operation_timeout by default.
        nic: only over this one of engine.nics. after: watcher.at(value), to hold the write back
        until the watcher has reached the value.
        Raises OutOfBounds, UnknownRegion, Backpressure, or the reason why the peer is lost.
        """
        self._require_connected()
        with translated():
            submitted = self.engine.native.write(
                self.id,
                src.handle,
                dst,
                source_offset=src_offset,
                destination_offset=dst_offset,
                length=length,
                imm=imm,
                timeout=timeout or 0.0,
                nic=nic,
                after=after,
            )
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_pages(
        self,
        src: MemoryRegion,
        dst: bytes,
        *,
        page_length: int,
        src_pages: Any,
        dst_pages: Any,
        src_stride: int,
        dst_stride: int,
        src_offset: int = 0,
        dst_offset: int = 0,
        imm: int | None = None,
        timeout: float | None = None,
        nic: int | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Writes pages: page i moves `page_length` bytes from src_offset + src_pages[i] *
        src_stride to dst_offset + dst_pages[i] * dst_stride.

        src_pages, dst_pages: one-dimensional buffers of int32 or int64 (numpy arrays), of equal
        length. One call for all pages of a layer: 100,000 pages are one native crossing. See
        write() for the rest.
        """
        self._require_connected()
        with translated():
            submitted = self.engine.native.write_pages(
                self.id,
                src.handle,
                dst,
                page_length=page_length,
                source_pages=src_pages,
                destination_pages=dst_pages,
                source_stride=src_stride,
                destination_stride=dst_stride,
                source_offset=src_offset,
                destination_offset=dst_offset,
                imm=imm,
                timeout=timeout or 0.0,
                nic=nic,
                after=after,
            )
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_list(
        self,
        src: Sequence[MemoryRegion],
        dst: Sequence[bytes],
        *,
        src_offsets: Integers,
        dst_offsets: Integers,
        lengths: Integers,
        imm: int | None = None,
        timeout: float | None = None,
        nic: int | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Many writes as one operation with one total: lengths[i] bytes from src_offsets[i] of the
        region src[i] to dst_offsets[i] of the region dst[i] (a descriptor).

        src_offsets, dst_offsets, lengths: as many integers as there are regions, as a sequence or
        a one-dimensional buffer of int32 or int64. All are submitted, or none. See write() for
        the rest.
        """
        self._require_connected()
        with translated():
            submitted = self.engine.native.write_list(
                self.id,
                [region.handle for region in src],
                dst,
                source_offsets=buffer_of(src_offsets),
                destination_offsets=buffer_of(dst_offsets),
                lengths=buffer_of(lengths),
                imm=imm,
                timeout=timeout or 0.0,
                nic=nic,
                after=after,
            )
        return self.engine._track(Operation(self.engine.native, *submitted))

    def write_imm(
        self,
        imm: int,
        *,
        timeout: float | None = None,
        nic: int | None = None,
        after: WatchFor | None = None,
    ) -> Operation:
        """Counts one at the receiver, without any bytes."""
        self._require_connected()
        with translated():
            submitted = self.engine.native.write_imm(
                self.id, imm, timeout=timeout or 0.0, nic=nic, after=after
            )
        return self.engine._track(Operation(self.engine.native, *submitted))

    def send(self, data: bytes) -> None:
        """Sends a message of at most 1 MiB: ordered among messages, not among writes. That it was
        lost shows as the peer being lost. Raises Backpressure while 16 MiB wait."""
        self._require_connected()
        with translated():
            self.engine.native.send(self.id, data)

    async def receive(self, timeout: float | None = None) -> bytes:
        """The next message. Only where the engine has no handler.

        Raises the peer's error once it is lost, DeadlineExceeded after `timeout` seconds.
        """
        if self.error is not None and self._inbox.empty():
            raise self.error
        try:
            async with asyncio.timeout(timeout):
                item = await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceeded(
                f"no message from peer {self.name!r} within {timeout} s"
            ) from None
        if isinstance(item, PeerError):
            self._inbox.put_nowait(item)  # for the other waiters
            raise item
        return item

    def on_lost(self, callback: Callable[[Peer], object]) -> None:
        """Calls with this peer when it is lost, or now if it is; `error` says why. Before the
        engine's handler hears of it."""
        if self.error is not None:
            tell(callback, self)
        else:
            self._on_lost.append(callback)

    def forget_on_lost(self, callback: Callable[[Peer], object]) -> None:
        """Takes one on_lost() back."""
        if callback in self._on_lost:
            self._on_lost.remove(callback)

    def fence(self) -> None:
        """After this no write of the peer lands here. The peer is lost to this engine."""
        with translated():
            self.engine.native.fence(self.id)

    def close(self) -> None:
        """Disconnects; operations under way end with PeerLost. Idempotent."""
        self.engine.native.disconnect(self.id)

    def _deliver(self, data: bytes) -> None:
        """The engine's report of a message. Event loop only."""
        self._inbox.put_nowait(data)

    def _lose(self, error: PeerError) -> None:
        """The engine's report that the peer is lost. Event loop only."""
        self.error = error
        self._inbox.put_nowait(error)
        callbacks, self._on_lost = self._on_lost, []
        for callback in callbacks:
            tell(callback, self)

    def _require_connected(self) -> None:
        """Raises the reason why the peer is lost, if it is."""
        # Until the loss is reported, the native engine knows no more than PeerLost.
        if self.error is not None:
            raise type(self.error)(str(self.error))

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, engine {self.engine_id[:8]}, {self.fabric})"
