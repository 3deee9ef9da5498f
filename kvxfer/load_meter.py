"""Rates and latencies of a worker over the last minute, for the autoscaler."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock

_SECONDS: Final = 60.0
# Counts within a second are merged.
_BUCKET_SECONDS: Final = 1.0
# The most latencies that are kept; the oldest are dropped first.
_SAMPLES: Final = 4096


class LoadMeter:
    """Sliding windows over the last `seconds`. One thread, or one event loop."""

    def __init__(self, *, seconds: float = _SECONDS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = seconds
        self._clock = clock
        self._began = clock.monotonic()
        self._requests: deque[tuple[float, float]] = deque()
        self._tokens: deque[tuple[float, float]] = deque()
        self._ttft: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)
        self._itl: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)

    @contextmanager
    def request(self, tokens: int = 0) -> Iterator[None]:
        """Counts a request and the `tokens` of its prompt from the start of the block. If the block
        fails, both are taken back."""
        self.requests(1)
        self.tokens(tokens)
        try:
            yield
        except BaseException:
            self.requests(-1)
            self.tokens(-tokens)
            raise

    def requests(self, count: int) -> None:
        """Counts arrived requests. A negative count takes back some that were not computed."""
        self._count(self._requests, count)

    def tokens(self, count: int) -> None:
        """Counts tokens that arrived or were emitted. A negative count takes back some that were
        not computed."""
        self._count(self._tokens, count)

    def first_token(self, seconds: float) -> None:
        """Notes that a request got its first token after `seconds`."""
        self._ttft.append((self._clock.monotonic(), seconds))

    def next_tokens(self, seconds: float) -> None:
        """Notes that a token came `seconds` after the one before."""
        self._itl.append((self._clock.monotonic(), seconds))

    @property
    def requests_per_second(self) -> float:
        return self._rate(self._requests)

    @property
    def tokens_per_second(self) -> float:
        return self._rate(self._tokens)

    @property
    def ttft_p90(self) -> float | None:
        return self._p90(self._ttft)

    @property
    def itl_p90(self) -> float | None:
        return self._p90(self._itl)

    def _count(self, samples: deque[tuple[float, float]], count: int) -> None:
        now = self._clock.monotonic()
        if samples and now - samples[-1][0] < _BUCKET_SECONDS:
            begun, before = samples[-1]
            samples[-1] = (begun, before + count)
        else:
            self._forget(samples)
            samples.append((now, float(count)))

    def _rate(self, samples: deque[tuple[float, float]]) -> float:
        self._forget(samples)
        # A worker that has just started has no whole window yet; one second bounds the rate.
        watched = min(self._clock.monotonic() - self._began, self._seconds)
        # A count that is taken back may already have left the window: the sum may be negative.
        return max(sum(value for _, value in samples), 0.0) / max(watched, 1.0)

    def _p90(self, samples: deque[tuple[float, float]]) -> float | None:
        """Returns the smallest value that at least nine of ten do not exceed; None without any."""
        self._forget(samples)
        if not samples:
            return None
        values = sorted(value for _, value in samples)
        return values[math.ceil(0.9 * len(values)) - 1]

    def _forget(self, samples: deque[tuple[float, float]]) -> None:
        oldest = self._clock.monotonic() - self._seconds
        while samples and samples[0][0] < oldest:
            samples.popleft()
