"""The choice of a sender among the ranks that hold the same bytes.

Bytes that only one rank holds are part of its load in any case. The rest is dealt out so that the
loads become level, as water does in connected vessels: first the lots with the fewest holders, and
among these the largest. Further rounds deal each lot out again, given all others (block coordinate
descent on the sum of the squared loads).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from kvxfer.weights.maps import Side
from kvxfer.weights.plan.boxes import Ints

# The most that a near rank may send, in mean loads. A preference for near ranks may raise the
# largest load by the same factor.
_SLACK: Final = 1.02
# The most rounds. They end early when the largest load is within _ENOUGH of the mean, or hardly
# falls (_WORTH_IT).
_PASSES: Final = 8
_ENOUGH: Final = 1.01
_WORTH_IT: Final = 0.999


class Span(NamedTuple):
    """Units of a demand: slices of its parameters, parameter by parameter."""

    demand: int
    first: int
    end: int
    unit_bytes: float

    @property
    def nbytes(self) -> float:
        return (self.end - self.first) * self.unit_bytes


class Lot(NamedTuple):
    """Spans that are dealt out together: they have the same receiver and the same holders."""

    holders: tuple[int, ...]
    receiver: int
    spans: tuple[Span, ...]
    least: float
    """Bytes below which a sender's share is not worth an operation."""

    @property
    def nbytes(self) -> float:
        return sum(span.nbytes for span in self.spans)


class Near(NamedTuple):
    """Labels of the ranks of both sides; () if unknown."""

    train: tuple[str, ...]
    infer: tuple[str, ...]


def near_of(train: Side, infer: Side) -> tuple[Near, ...]:
    """Returns the labels, hosts before zones, without those that the two sides do not share."""
    labels = (Near(train.hosts, infer.hosts), Near(train.zones, infer.zones))
    return tuple(each for each in labels if set(each.train) & set(each.infer))


def deal(lots: Sequence[Lot], loads: Ints, near: Sequence[Near]) -> list[tuple[int, Span]]:
    """Returns each span with its sender.

    loads: the bytes that each training rank sends in any case. Near ranks are preferred up to 2 %
    above the mean load, and only if that raises the largest load by at most 2 %.
    """
    order = sorted(range(len(lots)), key=lambda at: (len(lots[at].holders), -lots[at].nbytes, at))
    sorted_lots = [lots[at] for at in order]
    plain, largest = _deal(sorted_lots, loads, ())
    if near:
        nearer, its_largest = _deal(sorted_lots, loads, near)
        if its_largest <= _SLACK * largest:
            return nearer
    return plain


def _deal(
    lots: Sequence[Lot], fixed: Ints, near: Sequence[Near]
) -> tuple[list[tuple[int, Span]], float]:
    loads: list[float] = fixed.astype(float).tolist()
    full = _SLACK * (sum(loads) + sum(lot.nbytes for lot in lots)) / max(1, len(loads))
    enough = max(_ENOUGH / _SLACK * full, max(loads, default=0.0))
    dealt: list[list[tuple[int, Span]]] = [[] for _ in lots]
    best, largest = dealt, math.inf
    for _ in range(_PASSES):
        for at, lot in enumerate(lots):
            for sender, span in dealt[at]:
                loads[sender] -= span.nbytes
            dealt[at] = _deal_one(lot, loads, near, full)
            for sender, span in dealt[at]:
                loads[sender] += span.nbytes
        before, now = largest, max(loads, default=0.0)
        if now < largest:
            best, largest = list(dealt), now
        if largest <= enough or now > _WORTH_IT * before:
            break
    return [each for of_lot in best for each in of_lot], largest


def _deal_one(
    lot: Lot, loads: list[float], near: Sequence[Near], full: float
) -> list[tuple[int, Span]]:
    total = lot.nbytes
    unit = max(span.unit_bytes for span in lot.spans)
    many = max(1, int(total / max(lot.least, unit)))
    shares = list(_shares(lot, total, many, loads, near, full))
    edges = list(accumulate(share for _, share in shares[:-1]))
    parts = split(lot.spans, edges)
    return [
        (sender, span) for (sender, _), spans in zip(shares, parts, strict=True) for span in spans
    ]


def _shares(
    lot: Lot, total: float, many: int, loads: list[float], near: Sequence[Near], full: float
) -> Iterator[tuple[int, float]]:
    """Yields senders and their bytes; considers at most `many` senders at a time."""
    left = list(lot.holders)
    for train, infer in near:
        beside = [rank for rank in left if train[rank] == infer[lot.receiver]]
        beside = sorted(beside, key=lambda rank: (loads[rank], rank))[:many]
        room = sum(max(0.0, full - loads[rank]) for rank in beside)
        if beside and room >= total:
            yield from _level(beside, total, loads)
            return
        if beside and room >= max(lot.least, 1.0):
            found = [each for each in _level(beside, room, loads) if each[1] > 0]
            yield from found
            total -= room
            taken = {rank for rank, _ in found}
            left = [rank for rank in left if rank not in taken] or left
    yield from _level(sorted(left, key=lambda rank: (loads[rank], rank))[:many], total, loads)


def _level(ranks: list[int], total: float, loads: list[float]) -> list[tuple[int, float]]:
    """Pours `total` onto ranks, sorted by load, so that those that get some become level."""
    poured = 0.0
    wet = len(ranks)
    for at in range(1, len(ranks)):
        poured += loads[ranks[at - 1]]
        if loads[ranks[at]] * at - poured >= total:
            wet = at
            break
    level = (total + sum(loads[rank] for rank in ranks[:wet])) / wet
    return [(rank, level - loads[rank]) for rank in ranks[:wet]]


def split(spans: Sequence[Span], edges: Sequence[float]) -> list[list[Span]]:
    """Cuts consecutive spans at `edges`, in bytes from their begin, rounded to whole units. Returns
    one more list than there are edges."""
    begins = [0.0, *accumulate(span.nbytes for span in spans)]
    found: list[list[Span]] = []
    at, first = 0, spans[0].first
    for edge in edges:
        to = min(max(bisect_right(begins, edge) - 1, 0), len(spans) - 1)
        span = spans[to]
        end = min(span.end, span.first + round((edge - begins[to]) / span.unit_bytes))
        piece: list[Span] = []
        while at < to:
            piece.append(spans[at]._replace(first=first))
            at += 1
            first = spans[at].first
        if end > first:
            piece.append(span._replace(first=first, end=end))
            first = end
        found.append([each for each in piece if each.end > each.first])
    rest = [spans[at]._replace(first=first), *spans[at + 1 :]]
    found.append([each for each in rest if each.end > each.first])
    return found


def loads_of(senders: Ints, nbytes: Ints, ranks: int) -> Ints:
    """Returns the bytes of each rank."""
    loads = np.zeros(ranks, np.int64)
    np.add.at(loads, senders, nbytes)
    return loads
