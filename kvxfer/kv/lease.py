"""A lease: how long one side of a transfer waits for the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvxfer.clock import Clock
from kvxfer.errors import InvalidArgument


class Lease:
    """Calls `expire` on the event loop when `seconds` have passed. remaining(): any thread."""

    def __init__(self, seconds: float, expire: Callable[[], None], clock: Clock) -> None:
        self._expire = expire
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """Starts again: the lease now ends `seconds` from now. Raises InvalidArgument."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidArgument(f"a lease of {seconds} s; give it more than 0 and a finite time")
        self.end()
        self.seconds = seconds
        self._deadline = self._clock.monotonic() + seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def remaining(self) -> float:
        """Seconds until the end, and at least a millisecond: a wait needs some deadline."""
        return max(self._deadline - self._clock.monotonic(), 0.001)

    def end(self) -> None:
        """The lease is not needed any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
