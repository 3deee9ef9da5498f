"""An engine that measures for how long it had writes under way."""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.engine import Engine
from kvxfer.engine.core import OperationT


class MeteredEngine(Engine):
    """An engine that adds up the time in which at least one of its writes was not delivered yet.

    Bytes over that time is the rate at which a cache moves; bytes over the time of a whole
    request would mostly measure how fast the model computes.
    """

    clock: Clock = SYSTEM_CLOCK
    """The clock; set before the engine is entered."""

    _loop_of_tasks: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        self._loop_of_tasks = asyncio.get_running_loop()
        self._meter = threading.Lock()
        self._under_way = 0
        self._busy_since = 0.0
        self._busy = 0.0
        return await super().__aenter__()

    def busy_seconds(self) -> float:
        """Returns that time since the start. Any thread."""
        with self._meter:
            running = self.clock.monotonic() - self._busy_since if self._under_way else 0.0
            return self._busy + running

    def _track(self, operation: OperationT) -> OperationT:
        super()._track(operation)
        with self._meter:
            if not self._under_way:
                self._busy_since = self.clock.monotonic()
            self._under_way += 1
        self._loop_of_tasks.call_soon_threadsafe(operation.on_end, self._ended)
        return operation

    def _ended(self) -> None:
        with self._meter:
            self._under_way -= 1
            if not self._under_way:
                self._busy += self.clock.monotonic() - self._busy_since
