"""Which scales several training ranks have a part of: their greatest magnitudes are exchanged in
one vector, for all parameters at once.

Each rank knows what all of them hold, and finds the same vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.plan.boxes import Pattern, disjoint
from kvxfer.weights.quantize import Quantization, cell_of, cells_of
from kvxfer.weights.torch_boxes import Box

_Ints: TypeAlias = NDArray[np.int64]
_Whole: TypeAlias = tuple[Quantization, tuple[int, ...]]


class Part(NamedTuple):
    """What one rank has of a parameter that is sent quantised."""

    name: str
    how: Quantization
    whole: tuple[int, ...]
    box: Box


class Shared(NamedTuple):
    """Of one parameter at one rank."""

    own: _Ints
    """Which scales of its box."""
    at: _Ints
    """Where they are in the vector."""


class Exchange(NamedTuple):
    """Of one rank."""

    names: tuple[str, ...]
    """Of all parameters of all ranks; sorted."""
    shared: dict[str, Shared]
    length: int
    """Of the vector."""


def exchange_of(ranks: Sequence[Sequence[Part]], rank: int) -> Exchange:
    """Of a rank, given the parts of all ranks.

    Ranks that have the same box have the same values, and exchange nothing on that account.
    Raises WeightsMismatch where ranks do not quantise alike, and InvalidArgument where a scale is
    of elements that none of these ranks has.
    """
    known: dict[str, _Whole] = {}
    boxes: dict[str, set[Box]] = {}
    for number, parts in enumerate(ranks):
        for part in parts:
            this = (part.how, part.whole)
            if known.setdefault(part.name, this) != this:
                raise WeightsMismatch(
                    f"{part.name} is quantised as {known[part.name]} at one training rank and as "
                    f"{this} at rank {number}; decide by what all ranks know"
                )
            boxes.setdefault(part.name, set()).add(part.box)
    ours = {part.name: part.box for part in ranks[rank]}
    found: dict[tuple[_Whole, tuple[Box, ...]], _Ints | None] = {}  # layers are alike
    shared: dict[str, Shared] = {}
    length = 0
    names = tuple(sorted(known))
    for name in names:
        how, whole = known[name]
        alike = (known[name], tuple(sorted(boxes[name])))
        if alike not in found:
            found[alike] = _shared(cell_of(how, whole), *alike[1:], whole)
        cells = found[alike]
        if cells is None:
            raise InvalidArgument(
                f"{name} has scales of elements that no rank of this process group has; give the "
                "group of all training ranks that have a part of it"
            )
        if name in ours:
            scales = cells_of(cell_of(how, whole), ours[name])
            inside = (cells >= scales.offset) & (cells < np.add(scales.offset, scales.shape))
            at = np.flatnonzero(inside.all(axis=1))
            if len(at):
                local = cells[at] - np.array(scales.offset)
                own = np.ravel_multi_index(tuple(local.T), scales.shape)
                shared[name] = Shared(own.astype(np.int64), at + length)
        length += len(cells)
    return Exchange(names, shared, length)


def _shared(cell: tuple[int, ...], boxes: tuple[Box, ...], whole: tuple[int, ...]) -> _Ints | None:
    """Cells that more than one box has elements of, `[cells, dimensions]`; None where the boxes
    together have some elements of a cell, and not all of them."""
    grid = cells_of(cell, Box((0,) * len(whole), whole)).shape
    times = np.zeros(grid, np.int64)
    for box in boxes:
        times[_within(cell, box)] += 1
    edges = [
        [(first, first + size) for first, size in zip(box.offset, box.shape, strict=True)]
        for box in boxes
    ]
    pattern = Pattern(np.array(edges, np.int64), tuple((at,) for at in range(len(boxes))), {})
    had = np.zeros(grid, np.int64)
    for each in disjoint(pattern).boxes.tolist():
        box = Box(tuple(first for first, _ in each), tuple(end - first for first, end in each))
        had[_within(cell, box)] += _elements(cell, box)
    if ((had > 0) & (had < _elements(cell, Box((0,) * len(whole), whole)))).any():
        return None
    return np.argwhere(times > 1)


def _within(cell: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    scales = cells_of(cell, box)
    return tuple(
        slice(first, first + size) for first, size in zip(scales.offset, scales.shape, strict=True)
    )


def _elements(cell: tuple[int, ...], box: Box) -> _Ints:
    """How many elements of each cell a box has."""
    along: list[_Ints] = []
    for size, first, length in zip(cell, box.offset, box.shape, strict=True):
        end = first + length
        begins = np.arange(first // size, -(-end // size), dtype=np.int64) * size
        along.append(np.minimum(begins + size, end) - np.maximum(begins, first))
    return reduce(np.multiply.outer, along)
