"""How much of the KV cache an endpoint sends where: rates of the last seconds."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.instances import Traffic

_SECONDS: Final = 10.0
_LEAST_SECONDS: Final = 1.0
# As many are told; a heartbeat stays small whatever the fleet.
_MOST: Final = 64


class Sender(Protocol):
    """A transfer that is under way, such as a PrefillSession."""

    def delivered(self) -> Iterator[tuple[str, str, int]]:
        """Instance, fabric, and bytes so far."""


class TrafficMeter:
    """Loop only. Transfers are looked at when somebody asks: nothing is counted per write."""

    def __init__(self, *, seconds: float = _SECONDS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = clock.monotonic()
        self._fresh: Counter[tuple[str, str]] = Counter()
        # When they were looked at, and what was new then. What came before is older than `_since`.
        self._steps: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._seen: dict[Sender, Counter[tuple[str, str]]] = {}

    def end(self, sender: Sender) -> None:
        """Counts the rest of a transfer, which is not asked any more."""
        self._look(sender)
        del self._seen[sender]

    def rates(self, senders: Iterable[Sender]) -> tuple[Traffic, ...]:
        """Delivered bytes per second, those of `senders` and of all that have ended; the most
        first."""
        for sender in senders:
            self._look(sender)
        now = self._clock.monotonic()
        self._steps.append((now, self._fresh))
        self._fresh = Counter()
        while self._steps[0][0] <= now - self._seconds:
            self._since, _ = self._steps.popleft()
        moved: Counter[tuple[str, str]] = Counter()
        for _, step in self._steps:
            moved.update(step)
        seconds = max(now - self._since, _LEAST_SECONDS)
        most = heapq.nlargest(_MOST, moved.items(), key=lambda item: item[1])
        return tuple(
            Traffic(to=to, fabric=fabric, bytes_per_second=nbytes / seconds)
            for (to, fabric), nbytes in most
        )

    def _look(self, sender: Sender) -> None:
        now: Counter[tuple[str, str]] = Counter()
        for to, fabric, nbytes in sender.delivered():
            now[to, fabric] += nbytes
        self._fresh.update(now - self._seen.get(sender, Counter()))
        self._seen[sender] = now
