"""The receiver's engine and the pool that it receives into."""

from __future__ import annotations

from contextlib import AsyncExitStack

from kvxfer.bench import pattern
from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.bench.pool import anonymous_pool
from kvxfer.bench.settings import PEER_TIMEOUT_SECONDS
from kvxfer.engine import Counter, Engine, MemoryRegion
from kvxfer.errors import BenchError, EngineError

# The sender's operation is complete before it asks: what is still missing then stays missing.
_ARRIVAL_TIMEOUT = 10.0


class Destination:
    """One pool, one engine at a time. Used on the event loop.

    `pool` is the memory received into; for memory of a GPU, it is the copy read from there.
    """

    def __init__(self, pool_bytes: int, gpu: int | None = None) -> None:
        self.pool = anonymous_pool(pool_bytes)
        self._gpu = gpu
        self._on_gpu: MemoryRegion | None = None
        self._engine: Engine | None = None
        self._open = AsyncExitStack()
        self._counters: list[Counter] = []

    async def open_engine(self, fabrics: tuple[str, ...], cluster_key: bytes) -> tuple[str, bytes]:
        """Starts an engine and registers the pool; returns address and region descriptor."""
        engine = Engine(
            cluster_key=cluster_key,
            name="bench receiver",
            fabrics=fabrics,
            peer_timeout=PEER_TIMEOUT_SECONDS,
        )
        await self._open.enter_async_context(engine)
        return engine.address, self.use_engine(engine)

    def use_engine(self, engine: Engine) -> bytes:
        """Registers the pool with an engine that is open; returns the region's descriptor."""
        if self._gpu is None:
            region = engine.register(self.pool)
        else:
            region = self._on_gpu = engine.alloc(len(self.pool), gpu=self._gpu).region
        self._open.callback(region.close)
        self._engine = engine
        return region.descriptor

    async def close_engine(self) -> None:
        """Takes the pool from its engine, and closes the engine if open_engine() started it."""
        for counter in self._counters:
            counter.release()
        self._counters = []
        self._engine = self._on_gpu = None
        await self._open.aclose()

    def new_counters(self, count: int) -> list[int]:
        """Takes `count` counters; returns their immediates."""
        if self._engine is None:
            raise BenchError("no engine is open")
        self._counters = [self._engine.counter() for _ in range(count)]
        return [counter.imm for counter in self._counters]

    async def arrivals(self) -> list[int]:
        """Waits until each counter shows one write; returns when each did, in
        `time.monotonic_ns()`, and releases them."""
        at_ns = []
        for counter in self._counters:
            await counter.wait(1, timeout=_ARRIVAL_TIMEOUT)
            if counter.completed_at_ns is None:
                raise BenchError("the engine does not say when a counter was complete")
            at_ns.append(counter.completed_at_ns)
            counter.release()
        return at_ns

    async def check_writes(self, draw: PageDraw, total: int) -> None:
        """Checks count and bytes of what the sender's operations delivered, then wipes them.

        Raises BenchError if the one counter does not show exactly `total`, WrongBytes if the pool
        does not hold exactly the draw's pages.
        """
        (counter,) = self._counters
        try:
            await counter.wait(total, timeout=_ARRIVAL_TIMEOUT)
        except EngineError as error:
            raise BenchError(f"{counter.value} of {total} immediates came: {error}") from error
        if counter.value != total:
            raise BenchError(f"{counter.value} immediates came where {total} were sent")
        counter.release()
        self.check_pages(draw)

    def check_pages(self, draw: PageDraw) -> None:
        """Checks that the pool holds the draw's pages and nothing else, and wipes it."""
        self.check(draw.draw())
        pattern.verify_blank(self.pool)

    def check(self, requests: list[PageLists]) -> None:
        """Checks that the pool holds these pages, and wipes them."""
        if self._on_gpu is not None:
            self._on_gpu.read(self.pool)
        for pages in requests:
            pattern.verify(self.pool, pages)
            pattern.wipe(self.pool, pages)
        if self._on_gpu is not None:
            self._on_gpu.write(self.pool)
