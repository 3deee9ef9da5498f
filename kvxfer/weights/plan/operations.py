"""Operations: what a sender writes to a receiver at once, one large slice or many small boxes.

A *unit* of a demand is one slice of one parameter of its class: unit `u` is slice `u % slices` of
parameter `u // slices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvxfer.weights.plan.balance import Lot, Near, Span, deal, loads_of, split
from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.plan.cuts import Cut, cut
from kvxfer.weights.plan.demands import Demands


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations, one per row. The pieces of row i have the rows
    `first_piece[i]:first_piece[i + 1]` of the arrays `piece_…`."""

    sender: Ints
    receiver: Ints
    nbytes: Ints
    first_piece: Ints
    """One more entry than there are operations."""
    piece_demand: Ints
    piece_first: Ints
    """The first unit."""
    piece_end: Ints
    cuts: tuple[Cut, ...]
    """The cut of each demand."""


@dataclass(frozen=True, slots=True)
class _Units:
    """The units into which each demand is cut."""

    cuts: tuple[Cut, ...]
    slices: Ints
    units: Ints
    largest: Ints
    """Bytes of the largest unit."""
    mean: list[float]


def operations_of(
    demands: Demands,
    ranks: int,
    *,
    slice_bytes: int,
    gather_bytes: int,
    near: tuple[Near, ...] = (),
) -> Operations:
    """Chooses a sender for each demand, and makes operations.

    Slices have at most `slice_bytes`. Units smaller than `gather_bytes` are gathered into
    operations of at most `slice_bytes`. `ranks` is the number of training ranks.
    """
    units = _units(demands, slice_bytes)
    demand, sender, first, end = _dealt(demands, units, ranks, gather_bytes, near)
    small = units.largest[demand] < gather_bytes
    large = _singles(demand[~small], sender[~small], first[~small], end[~small])
    large_bytes = _bytes_of(demands, units, large[0], large[2])
    # Sorted, so that the spans of one pair of ranks are adjacent.
    rows = np.flatnonzero(small)
    rows = rows[
        np.lexsort((first[rows], demand[rows], demands.receiver[demand[rows]], sender[rows]))
    ]
    gathered = list(
        _gathered(
            zip(
                sender[rows].tolist(),
                demands.receiver[demand[rows]].tolist(),
                map(
                    Span,
                    demand[rows].tolist(),
                    first[rows].tolist(),
                    end[rows].tolist(),
                    demands.nbytes[demand[rows]].tolist(),
                ),
                strict=True,
            ),
            slice_bytes - gather_bytes,
        )
    )
    pieces = [span for _, _, spans in gathered for span in spans]
    counts = np.array([len(spans) for _, _, spans in gathered], np.int64)
    small_bytes = [int(sum(span.nbytes for span in spans)) for _, _, spans in gathered]
    ones = np.ones(len(large[0]), np.int64)
    return Operations(
        sender=np.concatenate([large[1], np.array([each[0] for each in gathered], np.int64)]),
        receiver=np.concatenate(
            [demands.receiver[large[0]], np.array([each[1] for each in gathered], np.int64)]
        ),
        nbytes=np.concatenate([large_bytes, np.array(small_bytes, np.int64)]),
        first_piece=np.concatenate([[0], np.cumsum(np.concatenate([ones, counts]))]),
        piece_demand=np.concatenate([large[0], np.array([p.demand for p in pieces], np.int64)]),
        piece_first=np.concatenate([large[2], np.array([p.first for p in pieces], np.int64)]),
        piece_end=np.concatenate([large[2] + 1, np.array([p.end for p in pieces], np.int64)]),
        cuts=units.cuts,
    )


def _units(demands: Demands, slice_bytes: int) -> _Units:
    known: dict[tuple[int, tuple[int, ...]], tuple[Cut, int]] = {}
    cuts, largest = [], []
    for number, box in zip(demands.of_class.tolist(), demands.box, strict=True):
        item = demands.classes[number].item_bytes
        key = (item, tuple((box[:, 1] - box[:, 0]).tolist()))
        if key not in known:
            made = cut(key[1], max(1, slice_bytes // item))
            known[key] = (made, int(made.elements().max()) * item)
        cuts.append(known[key][0])
        largest.append(known[key][1])
    slices = np.array([each.slices for each in cuts], np.int64)
    members = np.array([len(each.names) for each in demands.classes], np.int64)
    return _Units(
        cuts=tuple(cuts),
        slices=slices,
        units=members[demands.of_class] * slices,
        largest=np.array(largest, np.int64),
        mean=(demands.nbytes / slices).tolist(),
    )


def _dealt(
    demands: Demands, units: _Units, ranks: int, gather_bytes: int, near: tuple[Near, ...]
) -> tuple[Ints, Ints, Ints, Ints]:
    """Returns demand, sender and range of units of each share."""
    sole = np.array([len(each) == 1 for each in demands.holder_sets], bool)[demands.holders]
    firsts = np.array([each[0] for each in demands.holder_sets], np.int64)
    alone = np.flatnonzero(sole)
    sender = firsts[demands.holders[alone]]
    members = units.units // units.slices
    loads = loads_of(sender, (demands.nbytes * members)[alone], ranks)
    small = units.largest < gather_bytes
    lots: dict[tuple[int, int, int], list[Span]] = {}
    for at in np.flatnonzero(~sole).tolist():
        # Small demands with the same holders and receiver form one lot; any other is a lot alone.
        key = (int(demands.holders[at]), int(demands.receiver[at]), -1 if small[at] else at)
        lots.setdefault(key, []).append(Span(at, 0, int(units.units[at]), units.mean[at]))
    shared = deal(
        [
            Lot(demands.holder_sets[holders], receiver, tuple(spans), float(gather_bytes))
            for (holders, receiver, _), spans in lots.items()
        ],
        loads,
        near,
    )
    return (
        np.concatenate([alone, np.array([span.demand for _, span in shared], np.int64)]),
        np.concatenate([sender, np.array([rank for rank, _ in shared], np.int64)]),
        np.concatenate(
            [np.zeros(len(alone), np.int64), np.array([s.first for _, s in shared], np.int64)]
        ),
        np.concatenate([units.units[alone], np.array([s.end for _, s in shared], np.int64)]),
    )


def _singles(demand: Ints, sender: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns demand, sender and number of every unit of these ranges."""
    counts = end - first
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    unit = np.arange(len(begins)) - begins + np.repeat(first, counts)
    return np.repeat(demand, counts), np.repeat(sender, counts), unit


def _bytes_of(demands: Demands, units: _Units, demand: Ints, unit: Ints) -> Ints:
    """Returns the bytes of each of these units."""
    nbytes = demands.nbytes[demand]
    sliced = np.flatnonzero(units.slices[demand] > 1)
    tables: dict[Cut, Ints] = {}
    for at in sliced.tolist():
        made = units.cuts[demand[at]]
        if made not in tables:
            tables[made] = made.elements()
        item = demands.classes[demands.of_class[demand[at]]].item_bytes
        nbytes[at] = tables[made][unit[at] % made.slices] * item
    return nbytes


def _gathered(
    spans: Iterable[tuple[int, int, Span]], most: int
) -> Iterable[tuple[int, int, list[Span]]]:
    """Yields sender, receiver and spans of each operation: about `most` bytes of one pair. It may
    have a unit more, as spans are cut between units."""
    for (sender, receiver), of_pair in groupby(spans, key=lambda each: each[:2]):
        together = [span for _, _, span in of_pair]
        total = sum(span.nbytes for span in together)
        count = math.ceil(total / most)
        if count <= 1:
            yield sender, receiver, together
            continue
        edges = [total * at / count for at in range(1, count)]
        for part in split(together, edges):
            if part:
                yield sender, receiver, part
