"""What a worker measures of itself for the autoscaler: rates and latencies of the last minute."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock

_SECONDS: Final = 60.0
# Counts within a second become one.
_BUCKET_SECONDS: Final = 1.0
# Latencies kept at most; beyond it the oldest go first.
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
        """Counts a request, with so many tokens of its prompt, while it is computed and from then
        on; not if it fails meanwhile."""
        self.requests(1)
        self.tokens(tokens)
        try:
            yield
        except BaseException:
            self.requests(-1)
            self.tokens(-tokens)
            raise

    def requests(self, count: int) -> None:
        """Requests arrived; fewer than none: some that had arrived were not computed."""
        self._count(self._requests, count)

    def tokens(self, count: int) -> None:
        """Tokens came in, or were emitted; fewer than none: some that came were not computed."""
        self._count(self._tokens, count)

    def first_token(self, seconds: float) -> None:
        """A request got its first token after so many seconds."""
        self._ttft.append((self._clock.monotonic(), seconds))

    def next_tokens(self, seconds: float) -> None:
        """A token came so many seconds after the one before."""
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
        # A worker that has just begun has no whole window yet; one second keeps it from infinity.
        watched = min(self._clock.monotonic() - self._began, self._seconds)
        # What is taken back may have been forgotten before.
        return max(sum(value for _, value in samples), 0.0) / max(watched, 1.0)

    def _p90(self, samples: deque[tuple[float, float]]) -> float | None:
        """The smallest value that at least nine of ten do not exceed; None without any."""
        self._forget(samples)
        if not samples:
            return None
        values = sorted(value for _, value in samples)
        return values[math.ceil(0.9 * len(values)) - 1]

    def _forget(self, samples: deque[tuple[float, float]]) -> None:
        oldest = self._clock.monotonic() - self._seconds
        while samples and samples[0][0] < oldest:
            samples.popleft()
