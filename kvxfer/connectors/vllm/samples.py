"""The samples of one request (`n` above 1), which vLLM makes separate requests.

It calls them 0_ID to (n-1)_ID, with an ID that is random in part. They arrive one by one: the first
may have ended before the next one arrives.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from kvxfer.clock import SYSTEM_CLOCK, Clock

What = TypeVar("What")


class EndedSamples(Generic[What]):
    """The outcome of the first sample of a request, for samples that arrive after its end."""

    def __init__(self, seconds: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """`seconds`: how long an outcome is kept."""
        self._seconds = seconds
        self._clock = clock
        self._ended: dict[tuple[str, Hashable], tuple[float, What]] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, request_id: str, same: Hashable, what: What) -> None:
        """Keeps the outcome of a request that is a sample. `same`: what else its samples share."""
        self._forget()
        parent = _parent(request_id)
        if parent is not None:
            self._ended.pop((parent, same), None)
            self._ended[parent, same] = (self._clock.monotonic() + self._seconds, what)

    def of(self, request_id: str, same: Hashable) -> What | None:
        """Returns the outcome of an earlier sample, if there was one."""
        self._forget()
        parent = _parent(request_id)
        ended = None if parent is None else self._ended.get((parent, same))
        return None if ended is None else ended[1]

    def _forget(self) -> None:
        """Drops outcomes that were kept for long enough; the oldest is the first."""
        now = self._clock.monotonic()
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            del self._ended[next(iter(self._ended))]


def _parent(request_id: str) -> str | None:
    index, _, parent = request_id.partition("_")
    return parent if index.isdecimal() and parent else None
