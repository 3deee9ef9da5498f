"""The time that leases and tickets run on, as an argument, so that tests can move it."""

from __future__ import annotations

import time
from typing import Protocol


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
