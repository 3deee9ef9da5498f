"""ImmCounters: how many writes have arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvxfer.engine.native import native, translated
from kvxfer.errors import DeadlineExceeded, InvalidArgument, StaleCounter


class Counter:
    """Counts the writes that arrive with its immediate, from its creation on.

    imm: 32 bits (slot and generation), for the writer. completed_at_ns: CLOCK_MONOTONIC time of
    the last arrival, once wait() returned.
    """

    __slots__ = (
        "_engine",
        "_future",
        "_on_release",
        "_released",
        "_total",
        "completed_at_ns",
        "imm",
    )

    def __init__(
        self, engine: native.TransferEngine, imm: int, on_release: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._on_release = on_release
        self._future: asyncio.Future[int] | None = None
        self._released = False
        self._total = 0
        self.imm = imm
        self.completed_at_ns: int | None = None

    @property
    def value(self) -> int:
        """Writes that have arrived; 0 after release(). Any thread."""
        return self._engine.counter_value(self.imm)

    async def wait(self, total: int, timeout: float | None = None) -> None:
        """Returns once exactly `total` writes have arrived.

        Raises DeadlineExceeded after `timeout` seconds, StaleCounter if the counter is released
        meanwhile, and EngineError if more writes arrived than announced. One wait at a time.
        """
        if self._released:
            raise StaleCounter(f"counter {self.imm} was released")
        if self._future is not None:
            raise InvalidArgument("this counter is being waited for already")
        self._future = asyncio.get_running_loop().create_future()
        self._total = total
        try:
            with translated():
                self._engine.expect(self.imm, total)
            async with asyncio.timeout(timeout):
                self.completed_at_ns = await self._future
        except TimeoutError:
            raise DeadlineExceeded(
                f"counter {self.imm} stands at {self.value} of {total} writes after {timeout} s"
            ) from None
        finally:
            self._future = None

    def release(self) -> None:
        """Revokes: after this no write with the counter's immediate lands. Any thread; blocks
        briefly; idempotent."""
        if not self._released:
            self._released = True
            self._engine.release_counter(self.imm)
            self._on_release(self.imm)

    def resolve(self, error: Exception | None, timestamp_ns: int) -> None:
        """The engine's report. Event loop only."""
        if self._future is None or self._future.done():
            return
        if error is None and self.value < self._total:
            return  # the completion of an earlier wait that was given up
        if error is None:
            self._future.set_result(timestamp_ns)
        else:
            self._future.set_exception(error)
