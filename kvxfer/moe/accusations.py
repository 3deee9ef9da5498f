"""Two members that have lost each other, as others see it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from kvxfer.moe.view_messages import Flush


def loser(rank: int, told: Mapping[int, Flush]) -> int | None:
    """Who has to be taken for lost, of two that accuse each other; None where no two do.

    A pure function of what the two say, so that all ranks come to the same.

    rank: the one that concludes. told: what each other member that it has not lost says it lost.
    Who names `rank` has ended the connection to it, which it therefore accuses, too.
    """
    for other, flush in told.items():
        if rank in flush.lost:
            return _of_pair((rank, True), (other, rank in flush.closed))
    for one, other in combinations(sorted(told), 2):
        if other in told[one].lost and one in told[other].lost:
            return _of_pair((one, other in told[one].closed), (other, one in told[other].closed))
    return None


def _of_pair(*pair: tuple[int, bool]) -> int:
    """Each with whether it only saw its connection end. That one, or else the higher."""
    return max(pair, key=lambda each: (each[1], each[0]))[0]
