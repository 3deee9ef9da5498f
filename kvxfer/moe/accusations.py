"""Two members that have lost each other, as others see them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from kvxfer.moe.view_messages import Flush


def loser(rank: int, told: Mapping[int, Flush]) -> int | None:
    """Returns which of two members that accuse each other counts as lost; None if no two do.

    A pure function of the reports of the two, so that all ranks conclude the same.

    rank: the rank that concludes. told: the reports of the other members that it has not lost. A
    member that names `rank` as lost has ended their connection, so `rank` accuses it, too.
    """
    for other, flush in told.items():
        if rank in flush.lost:
            return _of_pair((rank, True), (other, rank in flush.closed))
    for one, other in combinations(sorted(told), 2):
        if other in told[one].lost and one in told[other].lost:
            return _of_pair((one, other in told[one].closed), (other, one in told[other].closed))
    return None


def _of_pair(*pair: tuple[int, bool]) -> int:
    """Picks one of two ranks, each given with whether it only saw its connection end: that one, or
    else the higher."""
    return max(pair, key=lambda each: (each[1], each[0]))[0]
