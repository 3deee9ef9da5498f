"""The one place that reads the time. Code that measures or waits is given a `Clock`; asyncio's own
waits (`asyncio.sleep`, `asyncio.timeout`) run on the event loop's time, which is `monotonic()`.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Final, Protocol

# The most seconds by which the wall clocks of two hosts may differ. NTP corrects a clock that is
# off by more than about a second, so two clocks that it keeps are less than two seconds apart.
CLOCK_LEEWAY: Final = 5.0


class Clock(Protocol):
    """A source of time: this machine's, or a test's."""

    def monotonic(self) -> float:
        """Returns seconds from an arbitrary point, never set back. Deadlines use it."""

    def unix(self) -> float:
        """Returns seconds since the Unix epoch. Tickets and records use it."""

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
    """Returns seconds since the Unix epoch as a date and time in UTC."""
    try:
        return f"{datetime.fromtimestamp(unix, UTC):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{unix:g} s since 1970"


def unix_ns(clock: Clock) -> int:
    """Returns `unix()` in nanoseconds, exact to some hundreds of nanoseconds."""
    return int(clock.unix() * 1e9)
