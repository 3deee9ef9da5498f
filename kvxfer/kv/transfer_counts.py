"""How the transfers of an endpoint ended: counted for the metrics, without their library."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from kvxfer.errors import ChecksumMismatch, KvxferError, NicLost, PeerLost, PeerTimeout

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
    """Of the transfers that were delivered: how many took at most each of SECONDS, or longer."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    sum: float = 0.0


class TransferCounts:
    """Loop only. Labels come from fixed sets: a direction, a fabric, the code of an error."""

    def __init__(self) -> None:
        # What alerts watch is there from the start: a series that is born at 1 has not increased.
        self.ended: Counter[tuple[str, str]] = Counter(
            {
                ("send", DELIVERED): 0,
                ("receive", DELIVERED): 0,
                ("receive", ChecksumMismatch.code): 0,
            }
        )
        """By direction and outcome: `delivered`, or the code of the error."""
        self.nbytes: Counter[tuple[str, str]] = Counter()
        """Of those that were delivered, by direction and fabric."""
        self.seconds: dict[str, Durations] = {"send": Durations(), "receive": Durations()}
        self.checked_bytes = 0
        """Bytes that were compared with their checksum."""
        self.lost_peers: Counter[str] = Counter(
            {error.code: 0 for error in (PeerLost, PeerTimeout, NicLost)}
        )
        """Peers that were lost, by the code of what became of them."""

    def delivered(self, direction: Direction, fabric: str, nbytes: int, seconds: float) -> None:
        self.ended[direction, DELIVERED] += 1
        self.nbytes[direction, fabric] += nbytes
        durations = self.seconds[direction]
        durations.buckets[bisect.bisect_left(SECONDS, seconds)] += 1
        durations.sum += seconds

    def failed(self, direction: Direction, error: KvxferError) -> None:
        self.ended[direction, error.code] += 1
