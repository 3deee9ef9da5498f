"""The ranks that share a host."""

from __future__ import annotations

from collections.abc import Mapping


def hosts_of(ranks: int, near: Mapping[int, frozenset[int]]) -> list[int]:
    """Returns the number of each rank's host: the first rank there. Ranks of one host have all
    added each other as near.

    near: the ranks near each rank, as it has reported them, and itself. A rank without a report is
    alone.
    """
    first: dict[frozenset[int], int] = {}
    return [first.setdefault(near[rank], rank) if rank in near else rank for rank in range(ranks)]
