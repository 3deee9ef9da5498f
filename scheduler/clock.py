"""The time that leases and tickets run on, as an argument, so that tests can move it."""

from __future__ import annotations

import time
from typing import Final, Protocol

# Of a gap between two readings of an AttendedClock, so much counts. A control plane reads it twice
# a second.
_MOST_SECONDS: Final = 1.0


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds from an arbitrary point, never set back: what leases are measured with."""

    def unix(self) -> float:
        """Seconds since the Unix epoch: what tickets and records carry."""


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class AttendedClock(SystemClock):
    """Measures leases that this process grants: while it is stopped or starved, nobody can renew
    one, and what was sent meanwhile waits in its sockets. Of a time in which nobody read it at
    most a second counts. Belongs to one thread."""

    def __init__(self) -> None:
        self._read = time.monotonic()
        self._now = self._read

    def monotonic(self) -> float:
        before, self._read = self._read, time.monotonic()
        self._now += min(self._read - before, _MOST_SECONDS)
        return self._now
