"""The one place that reads the time. Code that measures or waits is given a `Clock`; asyncio's own
waits (`asyncio.sleep`, `asyncio.timeout`) run on the event loop's time, which is `monotonic()`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final, Protocol

# By how much the wall clocks of two hosts may differ. NTP corrects a clock that is off by more than
# about a second, so those of two hosts that it keeps are less than two seconds apart.
CLOCK_LEEWAY: Final = 5.0


class Clock(Protocol):
    """What the time is read from: of this machine, or of a test."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary point, never set back: what deadlines are measured with."""

    def unix(self) -> float:
        """Seconds since the Unix epoch: what tickets and records carry."""

    def sleep(self, seconds: float) -> None:
        """Blocks the calling thread. Not for coroutines: they have `asyncio.sleep`."""


class SystemClock:
    """The clock of this machine."""

    def __repr__(self) -> str:  # in signatures that help() shows
        return "SYSTEM_CLOCK"

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK: Final = SystemClock()


def as_text(unix: float) -> str:
    """Seconds since the Unix epoch, as a time of day in UTC."""
    try:
        return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{unix:g} s since 1970"


def unix_ns(clock: Clock) -> int:
    """`unix()` in nanoseconds, exact to some hundreds of them."""
    return int(clock.unix() * 1e9)
