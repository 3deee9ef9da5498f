"""Virtual time: the one clock of a simulated fleet, and what happens at which time."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from .process import Process

# Both clocks begin at an arbitrary time that is the same in every run.
_MONOTONIC_BEGIN = 1000.0
_WALL_BEGIN = 1_700_000_000.0


class Clock:
    """Time, and the events of the network and of fate. What happens to a process waits while that
    is stopped, and does not happen to a dead one."""

    def __init__(self) -> None:
        self.now = _MONOTONIC_BEGIN
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None], Process | None]] = []
        self._order = itertools.count()

    def after(self, seconds: float, event: Callable[[], None], of: Process | None = None) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), event, of))

    def due_at(self) -> float:
        return self._queue[0][0] if self._queue else math.inf

    def happen(self) -> None:
        """The earliest event."""
        _, _, event, process = heapq.heappop(self._queue)
        self.events += 1
        if process is None or process.lets(event):
            event()

    def wall(self) -> float:
        """As the host of the process that runs has it; outside of processes the right one."""
        loop: Any = asyncio._get_running_loop()
        wrong = 0.0 if loop is None else loop.wall_wrong
        return _WALL_BEGIN + self.now - _MONOTONIC_BEGIN + wrong

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """The `time` module tells this time."""
        with (
            mock.patch.object(time, "monotonic", lambda: self.now),
            mock.patch.object(time, "time", self.wall),
        ):
            yield
