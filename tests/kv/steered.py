"""Engines without a fabric: a test delivers messages and writes, in its order.

Messages keep their order in each direction. Writes keep no order, neither among themselves nor with
messages. A cancelled operation ends when the writes that are under way have ended.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvxfer.errors import Backpressure, Cancelled, KvxferError, PeerLost, StaleCounter


@dataclass(eq=False)
class Region:
    data: np.ndarray[Any, np.dtype[np.uint8]]
    descriptor: bytes
    gpu: int | None = None

    @property
    def nbytes(self) -> int:
        return len(self.data)

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)

    def close(self) -> None:
        pass


class Memory(np.ndarray[Any, np.dtype[np.uint8]]):
    region: Region

    def close(self) -> None:
        pass


class Counter:
    def __init__(self, engine: Engine, imm: int) -> None:
        self.engine = engine
        self.imm = imm
        self.value = 0
        self.live = True
        self.changed = asyncio.Event()

    def grant(self, ranges: Sequence[tuple[Region, int, int]]) -> list[bytes]:
        descriptors = []
        for region, offset, nbytes in ranges:
            name = f"{self.engine.name}/{len(self.engine.regions)}".encode()
            self.engine.regions[name] = Region(region.data[offset : offset + nbytes], name)
            descriptors.append(name)
        return descriptors

    def add(self) -> None:
        self.value += 1
        self.changed.set()

    async def wait(self, total: int, timeout: float | None = None) -> None:
        while self.live and self.value < total:
            self.changed.clear()
            await self.changed.wait()
        if not self.live:
            raise StaleCounter(f"counter {self.imm} was released")

    def release(self) -> None:
        self.live = False
        self.changed.set()

    def revoke(self, then: Callable[[], object]) -> None:
        self.release()
        if self.engine.revoking is None:
            then()
        else:
            self.engine.revoking.append(then)


@dataclass(eq=False)
class Write:
    """A page that is in flight."""

    operation: Operation
    source: Region
    src: int
    destination: Region
    dst: int
    length: int
    imm: int


@dataclass(eq=False)
class Operation:
    network: Network
    pages: list[Write] = field(default_factory=list)
    writes: int = 0
    immediates: int = 0
    nbytes: int = 0
    left: int = 0
    ended: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    error: KvxferError | None = None

    def one_ended(self) -> None:
        self.left -= 1
        if not self.left and not self.ended.done():
            if self.error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(self.error)

    def cancel(self) -> None:
        self.network.cancel(self, Cancelled("cancelled"))

    def done(self) -> bool:
        return self.ended.done()

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.shield(self.ended).__await__()


class Peer:
    _ids = iter(range(1, 1_000_000))

    def __init__(self, network: Network, here: Engine, there: Engine) -> None:
        self.id = next(self._ids)
        self.network, self.here, self.there = network, here, there
        self.engine_id = there.name
        self.fabric = "steered"
        self.alive = True
        self.error: KvxferError | None = None

    def send(self, data: bytes) -> None:
        if not self.alive:
            raise PeerLost(f"{self.engine_id} is lost")
        if len(self.network.messages[self.there.name]) >= self.network.max_messages:
            raise Backpressure("too many messages wait")
        self.network.messages[self.there.name].append(data)

    def write_pages(
        self, src: Any, dst: bytes, *, page_length: int, src_pages: Any, dst_pages: Any,
        src_stride: int, dst_stride: int, src_offset: int = 0, dst_offset: int = 0, imm: int = 0,
        timeout: float = 0, after: None = None,
    ) -> Operation:  # fmt: skip
        assert after is None, "these engines have no watched words"
        if not self.alive:
            raise PeerLost(f"{self.engine_id} is lost")
        if len(self.network.writes) >= self.network.max_queued:
            raise Backpressure("too many writes are queued")
        operation = Operation(self.network)
        for source_page, target_page in zip(src_pages, dst_pages, strict=True):
            operation.pages.append(
                Write(
                    operation,
                    src,
                    src_offset + int(source_page) * src_stride,
                    self.there.regions[dst],
                    dst_offset + int(target_page) * dst_stride,
                    page_length,
                    imm,
                )
            )
        operation.writes = operation.immediates = operation.left = len(operation.pages)
        operation.nbytes = operation.writes * page_length
        self.network.writes += operation.pages
        return operation

    def fence(self) -> None:
        self.network.cut(self.here, PeerLost("fenced"))


class Engine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.address = f"kvx://{name}"
        self.handler: Any = None
        self.regions: dict[bytes, Region] = {}
        self.counters: dict[int, Counter] = {}
        self.peer: Peer | None = None
        self.network: Network | None = None
        self.revoking: list[Callable[[], object]] | None = None
        """If a list: calls that wait until writers have stopped, as with NICs that place the
        bytes."""

    @property
    def peers(self) -> list[Peer]:
        return []

    def alloc(self, nbytes: int) -> Memory:
        region = Region(np.zeros(nbytes, np.uint8), f"{self.name}/{len(self.regions)}".encode())
        self.regions[region.descriptor] = region
        memory = region.data.view(Memory)
        memory.region = region
        return memory

    def counter(self, writer: object = None) -> Counter:
        counter = Counter(self, len(self.counters) + 1)
        self.counters[counter.imm] = counter
        return counter

    async def connect(self, address: str, timeout: float = 2.0) -> Peer:
        assert self.network is not None
        self.network.join()
        assert self.peer is not None
        return self.peer


class Network:
    """Two engines, and everything in flight between them.

    `landing` is called with each write just before its bytes are placed, `leaving` just before
    they are read.
    """

    def __init__(self, first: Engine, second: Engine) -> None:
        self.engines = {first.name: first, second.name: second}
        first.network = second.network = self
        self.messages: dict[str, deque[bytes]] = {name: deque() for name in self.engines}
        self.writes: list[Write] = []
        self.landing: Callable[[Write], None] = lambda write: None
        self.random = random.Random(0)
        self.max_queued = self.max_messages = 1_000_000

    def join(self) -> None:
        first, second = self.engines.values()
        if first.peer is None:
            first.peer, second.peer = Peer(self, first, second), Peer(self, second, first)
            for engine in (first, second):
                engine.handler.peer_up(engine.peer)

    def steps(self) -> list[Callable[[], None]]:
        """Returns the steps that can happen next."""
        steps: list[Callable[[], None]] = [
            lambda name=name: self._deliver_message(name)  # type: ignore[misc]
            for name, queue in self.messages.items()
            if queue
        ]
        if self.writes:
            steps += [self._deliver_write] * 3
        return steps

    def _deliver_message(self, name: str) -> None:
        engine = self.engines[name]
        data = self.messages[name].popleft()
        if engine.peer is not None and engine.peer.alive:
            engine.handler.message(engine.peer, data)

    def _deliver_write(self) -> None:
        write = self.writes.pop(self.random.randrange(len(self.writes)))
        receiver = self.engines[write.destination.descriptor.decode().split("/")[0]]
        counter = receiver.counters[write.imm]
        if counter.live:
            self.landing(write)
            target = write.destination.data[write.dst : write.dst + write.length]
            target[:] = write.source.data[write.src : write.src + write.length]
            counter.add()
        else:
            write.operation.error = StaleCounter(f"immediate {write.imm} names no live counter")
        write.operation.one_ended()

    def cancel(self, operation: Operation, error: KvxferError) -> None:
        """Withdraws writes that are not under way, and waits for those that are."""
        if operation.done() or operation.error is not None:
            return
        operation.error = error
        for write in [write for write in self.writes if write.operation is operation]:
            if self.random.random() < 0.7:
                self.writes.remove(write)
                operation.one_ended()

    def cut(self, by: Engine, error: KvxferError) -> None:
        """Ends the connection: nothing in flight lands, and both sides learn of it."""
        for engine in self.engines.values():
            peer = engine.peer
            if peer is None or not peer.alive:
                continue
            peer.alive, peer.error = False, error
            self.messages[engine.name].clear()
            if engine is not by and engine.handler is not None:
                asyncio.get_running_loop().call_soon(engine.handler.peer_lost, peer, error)
        writes, self.writes = self.writes, []
        for write in writes:
            write.operation.error = error
            write.operation.one_ended()

    def lose(self, error: KvxferError) -> None:
        """Ends the connection as a pulled cable does."""
        self.cut(Engine("nobody"), error)
