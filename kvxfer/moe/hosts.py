"""Which ranks share a host."""

from __future__ import annotations

from collections.abc import Mapping


def hosts_of(ranks: int, near: Mapping[int, frozenset[int]]) -> list[int]:
    """By rank, the number of its host: the first rank there. Ranks of one host have all added each
    other as near.

    near: what each rank has said, with itself. A rank that has said nothing is alone.
    """
    first: dict[frozenset[int], int] = {}
    return [first.setdefault(near[rank], rank) if rank in near else rank for rank in range(ranks)]
