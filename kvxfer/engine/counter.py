"""Counters of arrived immediates (ImmCounters)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

from kvxfer.engine.arguments import (
    REFUSALS,
    Count,
    Gpu,
    Length,
    Offset,
    Seconds,
    Stream,
    deadline,
    refused,
    require_callable,
)
from kvxfer.engine.callback import tell
from kvxfer.engine.memory import Region
from kvxfer.engine.native import native, translated
from kvxfer.engine.watcher import CounterMirror, StreamWait, stream_handle
from kvxfer.errors import DeadlineExceeded, InvalidArgument, StaleCounter

Ranges: TypeAlias = Sequence[tuple[Region, Offset, Length]]


class Counter:
    """A count of the arrivals of its immediate since its creation: with a write, or with the last
    of a group of writes.

    imm: 32 bits (slot and generation), for the writer. completed_at_ns: CLOCK_MONOTONIC time of
    the last arrival, once wait() returned.
    """

    __slots__ = (
        "_engine",
        "_future",
        "_on_arrival",
        "_on_release",
        "_on_revoke",
        "_released",
        "_told",
        "completed_at_ns",
        "imm",
    )

    def __init__(
        self,
        engine: native.TransferEngine,
        imm: int,
        on_release: Callable[[int], None],
        on_revoke: Callable[[int, Callable[[], object] | None], None],
    ) -> None:
        self._engine = engine
        self._on_release = on_release
        self._on_revoke = on_revoke
        self._future: asyncio.Future[int] | None = None
        self._on_arrival: Callable[[int], object] | None = None
        self._told = 0
        self._released = False
        self.imm = imm
        self.completed_at_ns: int | None = None

    @property
    def value(self) -> int:
        """The number of arrivals; 0 after release(). Any thread."""
        return self._engine.counter_value(self.imm)

    def grant(self, ranges: Ranges) -> list[bytes]:
        """Returns descriptors of (region, offset, bytes) ranges, in order, for the counter's
        writer.

        They permit it to write there with this counter's immediate (`imm=`), until the counter is
        released. A counter without a writer, or a range that is empty or leaves its region, raises
        InvalidArgument or OutOfBounds. Any thread.
        """
        try:
            return self._engine.grant(
                self.imm, [(region.handle, offset, nbytes) for region, offset, nbytes in ranges]
            )
        except REFUSALS as error:
            raise refused(error, Counter.grant, locals()) from None

    async def wait(self, total: Count, timeout: Seconds | None = None) -> None:
        """Returns once exactly `total` immediates have arrived: `immediates` of the operations.

        Raises DeadlineExceeded after `timeout` seconds, StaleCounter if the counter is released
        meanwhile, EngineClosed, and ProtocolError if more arrived than `total`. One wait at a
        time, any number one after the other.
        """
        await self._wait(total, timeout, at_least=False)

    async def wait_at_least(self, total: Count, timeout: Seconds | None = None) -> None:
        """Returns once `total` or more have arrived: for a counter that runs freely and has many
        waits. The count never decreases. Raises as wait() does."""
        await self._wait(total, timeout, at_least=True)

    def wait_on(
        self,
        stream: Stream,
        total: Count,
        timeout: Seconds | None = None,
        *,
        gpu: Gpu = 0,
        at_least: bool = False,
    ) -> StreamWait:
        """Makes later work in a CUDA stream of a GPU wait until `total` immediates have arrived. No
        thread waits. The stream continues in any case, so call `StreamWait.reached()` before any
        result of it is used.

        stream: a torch.cuda.Stream, an object with `__cuda_stream__`, or a CUstream as an int.
        timeout: seconds; operation_timeout by default. at_least: more may have arrived. Raises
        InvalidArgument for a stream of another GPU, and for one that is captured. Any thread.
        """
        try:
            return StreamWait(
                self._engine.wait_on_stream(
                    gpu,
                    stream_handle(stream),
                    self.imm,
                    total,
                    timeout=timeout,
                    at_least=at_least,
                )
            )
        except REFUSALS as error:
            raise refused(error, Counter.wait_on, locals()) from None

    def mirror(self, gpu: Gpu = 0) -> CounterMirror:
        """Returns a word of pinned host memory that follows the counter, for kernels of a GPU that
        wait for a count that only they know. Any thread.
        """
        try:
            return CounterMirror(self._engine.mirror_counter(gpu, self.imm))
        except REFUSALS as error:
            raise refused(error, Counter.mirror, locals()) from None

    def on_arrival(self, callback: Callable[[int], object]) -> None:
        """Calls back with the value, on the event loop, whenever it has grown since the last call.

        Several arrivals may cause one call: use the value, not the number of calls. The first call
        covers earlier arrivals. Errors of the callback are logged. It replaces an earlier callback.
        Event loop only. Raises StaleCounter.
        """
        require_callable("callback", callback)
        with translated():
            self._engine.subscribe(self.imm)
        self._on_arrival = callback
        self._told = 0
        asyncio.get_running_loop().call_soon(self._arrived)

    async def _wait(self, total: Count, timeout: Seconds | None, *, at_least: bool) -> None:
        limit = deadline(timeout)
        if self._released:
            raise StaleCounter(f"counter {self.imm} was released")
        if self._future is not None:
            raise InvalidArgument("this counter is being waited for already")
        self._future = asyncio.get_running_loop().create_future()
        try:
            self._engine.expect(self.imm, total, at_least=at_least)
            async with limit:
                self.completed_at_ns = await self._future
        except TimeoutError:
            raise DeadlineExceeded(
                f"counter {self.imm} stands at {self.value} of {total} immediates after {timeout} s"
            ) from None
        except REFUSALS as error:
            raise refused(error, Counter.wait, locals()) from None
        finally:
            self._future = None

    def release(self) -> None:
        """Revokes the counter: afterwards no write with its immediate lands. Any thread; blocks
        briefly; idempotent."""
        if not self._released:
            self._released = True
            self._engine.release_counter(self.imm)
            self._on_release(self.imm)

    def revoke(self, then: Callable[[], object]) -> None:
        """Releases without blocking, and calls `then` once no write with the counter's immediate
        lands any more. That is at once if the receiver places the bytes. If NICs do, it is when the
        writers have answered, or when their queue pairs have been reset after 150 ms. Event loop
        only. After an earlier release() it only calls `then`, at once."""
        require_callable("then", then)
        if self._released:
            then()
            return
        self._released = True
        self._on_revoke(self.imm, then)
        if self._engine.begin_release_counter(self.imm):
            self._on_revoke(self.imm, None)
            then()
        self._on_release(self.imm)

    def _resolve(self, error: Exception | None, timestamp_ns: int) -> None:
        """Takes the engine's report. Event loop only."""
        if self._future is None or self._future.done():
            return
        if error is None:
            self._future.set_result(timestamp_ns)
        else:
            self._future.set_exception(error)

    def _arrived(self) -> None:
        """Takes the engine's report of arrivals. Event loop only."""
        value = self._engine.take_arrivals(self.imm)
        if self._on_arrival is not None and value > self._told:
            self._told = value
            tell(self._on_arrival, value)
