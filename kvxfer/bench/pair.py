"""The sender's engine, connected to the receiver's, with a filled source pool."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np

from kvxfer.bench import messages as m
from kvxfer.bench import pattern
from kvxfer.bench.cases import Case, SourceMemory
from kvxfer.bench.channel import Channel
from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.bench.pool import anonymous_pool
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.engine import Engine, MemoryRegion, Peer
from kvxfer.errors import NotAvailableHere

# Many NICs, or a slow network, take their time to open paths.
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ReceiverEngine:
    """The parameters with which a sender connects and writes."""

    address: str
    descriptor: bytes
    fabrics: tuple[str, ...]
    cluster_key: bytes

    def sender(self) -> Engine:
        """Makes a new engine, not yet entered, that may connect."""
        return Engine(
            cluster_key=self.cluster_key,
            name="bench sender",
            fabrics=self.fabrics,
            peer_timeout=PEER_TIMEOUT_SECONDS,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One connected pair of engines under test. Used on the event loop."""

    channel: Channel
    receiver: ReceiverEngine
    engine: Engine
    peer: Peer
    region: MemoryRegion
    pool_bytes: int

    async def prepare(self, draw: PageDraw, nic: int | None = None) -> Transfer:
        """Draws the pages and takes the receiver's counter for them. None for `nic` uses all."""
        requests = draw.draw()
        imm = (await self.channel.call(m.NewCounters(1), m.Counters)).imms[0]
        return Transfer(self, draw, requests, imm, nic)

    async def transfer(self, draw: PageDraw, nic: int | None = None) -> list[int]:
        """Moves the draw's requests and checks them. Returns the nanoseconds of each."""
        transfer = await self.prepare(draw, nic)
        durations = await transfer.run()
        await transfer.check()
        return durations


class Transfer:
    """The requests of one draw, all counted by one counter."""

    def __init__(
        self, pair: Pair, draw: PageDraw, requests: list[PageLists], imm: int, nic: int | None
    ) -> None:
        self._pair, self._draw, self._requests = pair, draw, requests
        self._imm, self._nic = imm, nic
        self._immediates = 0

    async def run(self) -> list[int]:
        """Moves the requests one after the other; a further call moves them again. Returns the
        nanoseconds of each, from its submission until it is known to be delivered."""
        durations = []
        for pages in self._requests:
            start = time.monotonic_ns()
            operation = self._pair.peer.write_pages(
                self._pair.region,
                self._pair.receiver.descriptor,
                page_length=pages.page_bytes,
                src_pages=pages.src,
                dst_pages=pages.dst,
                src_stride=pages.page_bytes,
                dst_stride=pages.page_bytes,
                imm=self._imm,
                nic=self._nic,
            )
            await operation
            durations.append(time.monotonic_ns() - start)
            self._immediates += operation.immediates
        return durations

    async def check(self) -> None:
        """Has the receiver check every byte and the count. Raises WrongBytes or BenchError."""
        await self._pair.channel.call(m.CheckWrites(self._draw, self._immediates), m.Done)


@contextmanager
def source_memory(
    engine: Engine, memory: SourceMemory, nbytes: int, gpu: int | None = None
) -> Iterator[MemoryRegion]:
    """Makes a source pool of this engine, filled with the pattern. Allocated memory is that of the
    GPU if one is given."""
    match memory:
        case SourceMemory.REGISTERED:
            pool = anonymous_pool(nbytes)
            pattern.fill(pool)
            region = engine.register(pool)
            try:
                yield region
            finally:
                region.close()
        case SourceMemory.ALLOCATED:
            allocated = engine.alloc(nbytes, gpu=gpu)
            try:
                if gpu is None:
                    pattern.fill(np.frombuffer(memoryview(allocated), np.uint8))
                else:
                    pool = anonymous_pool(nbytes)
                    pattern.fill(pool)
                    allocated.region.write(pool)
                yield allocated.region
            finally:
                allocated.close()


@asynccontextmanager
async def receiver_engine(
    channel: Channel, fabrics: tuple[str, ...]
) -> AsyncIterator[ReceiverEngine]:
    """Opens the receiver process's engine, with its pool registered."""
    cluster_key = secrets.token_bytes(32)
    opened = await channel.call(m.OpenEngine(fabrics, cluster_key), m.EngineOpened)
    try:
        yield ReceiverEngine(opened.address, opened.descriptor, fabrics, cluster_key)
    finally:
        await channel.call(m.CloseEngine(), m.Done)


@asynccontextmanager
async def open_pair(channel: Channel, case: Case, pool_bytes: int) -> AsyncIterator[Pair]:
    """Opens both engines of a case. Raises NotAvailableHere if they talk another fabric."""
    async with (
        receiver_engine(channel, (case.fabric,)) as receiver,
        connected_pair(channel, receiver, case.memory, pool_bytes) as pair,
    ):
        yield pair


@asynccontextmanager
async def connected_pair(
    channel: Channel,
    receiver: ReceiverEngine,
    memory: SourceMemory,
    pool_bytes: int,
    gpu: int | None = None,
) -> AsyncIterator[Pair]:
    """Connects a new sender over the receiver's one fabric. Raises NotAvailableHere if they talk
    another."""
    (fabric,) = receiver.fabrics
    async with receiver.sender() as engine:
        with source_memory(engine, memory, pool_bytes, gpu) as region:
            peer = await engine.connect(receiver.address, _CONNECT_SECONDS)
            if peer.fabric != fabric:
                raise NotAvailableHere(
                    f"the engines talk {peer.fabric}, not {fabric}: `kvxfer doctor` says what "
                    "is missing on this host"
                )
            yield Pair(channel, receiver, engine, peer, region, pool_bytes)
