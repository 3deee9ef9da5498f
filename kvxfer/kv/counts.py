"""The counts of an endpoint: ended transfers, refusals, and traffic by decode worker. They do not
need the library of the metrics."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, TypeAlias

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ChecksumMismatch, KvxferError, NicLost, PeerLost, PeerTimeout
from kvxfer.instances import Traffic

DELIVERED: Final = "delivered"
SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)

Direction: TypeAlias = Literal["send", "receive"]


@dataclass(slots=True)
class Durations:
    """A histogram of the durations of delivered transfers: a bucket up to each of SECONDS, and one
    for longer ones."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0


class TransferCounts:
    """Counts of transfers. Loop only. Labels come from fixed sets: a direction, a fabric, the code
    of an error."""

    def __init__(self) -> None:
        # Alerts watch these, so they exist from the start: a series that begins at 1 has not
        # increased.
        self.ended: Counter[tuple[str, str]] = Counter(
            {
                ("send", DELIVERED): 0,
                ("receive", DELIVERED): 0,
                ("receive", ChecksumMismatch.code): 0,
            }
        )
        """Transfers by direction and outcome: `delivered`, or the code of the error."""
        self.nbytes: Counter[tuple[str, str]] = Counter()
        """Bytes of delivered transfers, by direction and fabric."""
        self.seconds: dict[str, Durations] = {"send": Durations(), "receive": Durations()}
        self.checked_bytes = 0
        """Bytes that were compared with their checksum."""
        self.lost_peers: Counter[str] = Counter(
            {error.code: 0 for error in (PeerLost, PeerTimeout, NicLost)}
        )
        """Lost peers, by the code of the error."""

    def delivered(self, direction: Direction, fabric: str, nbytes: int, seconds: float) -> None:
        self.ended[direction, DELIVERED] += 1
        self.nbytes[direction, fabric] += nbytes
        durations = self.seconds[direction]
        durations.buckets[bisect.bisect_left(SECONDS, seconds)] += 1
        durations.sum += seconds

    def failed(self, direction: Direction, error: KvxferError) -> None:
        self.ended[direction, error.code] += 1


class Refusals:
    """Counts of refusals. Loop only. Both labels come from fixed sets, never from a peer."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def count(self, what: str, error: KvxferError) -> None:
        self._counts[what, error.code] += 1

    def by_what(self) -> dict[str, dict[str, int]]:
        """Returns the counts by what was refused, then by code."""
        found: dict[str, dict[str, int]] = {}
        for (what, code), times in sorted(self._counts.items()):
            found.setdefault(what, {})[code] = times
        return found


_RATE_SECONDS: Final = 10.0
_LEAST_RATE_SECONDS: Final = 1.0
# The most rates in a heartbeat, which stays small in a large fleet.
_MOST_RATES: Final = 64


class Sender(Protocol):
    """A transfer that is under way, such as a PrefillSession."""

    def _delivered(self) -> Iterator[tuple[str, str, int]]:
        """Yields instances, fabrics, and bytes so far."""


class TrafficMeter:
    """A meter of the traffic to decode workers. Loop only. Transfers are read when the rates are
    asked for, so no write is counted."""

    def __init__(self, *, seconds: float = _RATE_SECONDS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = clock.monotonic()
        self._fresh: Counter[tuple[str, str]] = Counter()
        # The times of the readings, and the bytes since the reading before; `_since` is the time
        # of the reading before the first.
        self._steps: deque[tuple[float, Counter[tuple[str, str]]]] = deque()
        self._seen: dict[Sender, Counter[tuple[str, str]]] = {}

    def end(self, sender: Sender) -> None:
        """Counts the rest of a transfer, which is not read any more."""
        self._look(sender)
        del self._seen[sender]

    def rates(self, senders: Iterable[Sender]) -> tuple[Traffic, ...]:
        """Returns delivered bytes per second, of `senders` and of ended transfers, the highest
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
        seconds = max(now - self._since, _LEAST_RATE_SECONDS)
        most = heapq.nlargest(_MOST_RATES, moved.items(), key=lambda item: item[1])
        return tuple(
            Traffic(to=to, fabric=fabric, bytes_per_second=nbytes / seconds)
            for (to, fabric), nbytes in most
        )

    def _look(self, sender: Sender) -> None:
        now: Counter[tuple[str, str]] = Counter()
        for to, fabric, nbytes in sender._delivered():
            now[to, fabric] += nbytes
        self._fresh.update(now - self._seen.get(sender, Counter()))
        self._seen[sender] = now
