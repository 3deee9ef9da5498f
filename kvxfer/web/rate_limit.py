"""A limit of the requests of each caller, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from kvxfer.clock import Clock

_MAX_CALLERS: Final = 10_000
# Limits of a client address: enough for a rotation that goes wrong, useless for guessing.
WRONG_TOKENS_PER_SECOND: Final = 5
WRONG_TOKENS_AT_ONCE: Final = 50


class RateLimiter:
    """`rate` requests per second for each caller, and `burst` at once. One event loop.

    The generic cell rate algorithm (ITU-T I.371): one number per caller, the time at which its next
    request would be due at that rate. Beyond `max_callers`, the caller that was quiet longest is
    forgotten.
    """

    def __init__(
        self, rate: float, burst: int, clock: Clock, *, max_callers: int = _MAX_CALLERS
    ) -> None:
        self._interval = 1 / rate
        self._tolerance = (burst - 1) / rate
        self._clock = clock
        self._max_callers = max_callers
        self._due: OrderedDict[Hashable, float] = OrderedDict()

    def wait_seconds(self, caller: Hashable) -> float:
        """Counts a request. Returns 0 if it may go on, otherwise the seconds to wait; such a
        request does not count."""
        now = self._clock.monotonic()
        due = max(self._due.pop(caller, now), now)
        early = due - now - self._tolerance
        # A rounding error of the clock must not cost a request.
        admitted = early <= 1e-9
        self._due[caller] = due + self._interval if admitted else due
        if len(self._due) > self._max_callers:
            self._due.popitem(last=False)
        return 0.0 if admitted else early

    def __len__(self) -> int:
        return len(self._due)


def wrong_tokens(clock: Clock) -> RateLimiter:
    """Makes the limit for client addresses that send unknown tokens."""
    return RateLimiter(WRONG_TOKENS_PER_SECOND, WRONG_TOKENS_AT_ONCE, clock)
