"""Virtual time: the only clock of a simulation, and its queue of events."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Protocol

# Both clocks begin at an arbitrary time that is the same in every run.
_MONOTONIC_BEGIN = 1000.0
_WALL_BEGIN = 1_700_000_000.0


class Process(Protocol):
    """A simulated process, as its events see it."""

    def lets(self, event: Callable[[], None]) -> bool:
        """Returns whether the event happens now. Keeps it if the process is stopped."""


class Clock:
    """The time, and a queue of events of the network and of fate. The events of a process wait
    while it is stopped. The events of a dead process are dropped."""

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
        """Runs the earliest event."""
        _, _, event, process = heapq.heappop(self._queue)
        self.events += 1
        if process is None or process.lets(event):
            event()

    def wall(self) -> float:
        """Returns the seconds since the Unix epoch, on a correct wall clock."""
        return _WALL_BEGIN + self.now - _MONOTONIC_BEGIN


class ProcessClock:
    """The clock of a process: a `kvxfer.clock.Clock`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.wall_wrong = 0.0
        """The seconds by which the host's wall clock is ahead."""

    def monotonic(self) -> float:
        return self._clock.now

    def unix(self) -> float:
        return self._clock.wall() + self.wall_wrong

    def sleep(self, seconds: float) -> None:
        raise AssertionError("a process with one thread must not block it")
