"""The exchange of scales that several training ranks have a part of: their greatest magnitudes, in
one vector for all parameters.

Each rank knows what all of them hold, and derives the same layout of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.errors import InvalidArgument, WeightsMismatch
from kvxfer.weights.plan.boxes import Pattern, disjoint
from kvxfer.weights.quantize import Quantization, cell_of, cells_of
from kvxfer.weights.torch_boxes import Box

_Ints: TypeAlias = NDArray[np.int64]


class Kind(NamedTuple):
    """The box that one rank has of a quantised parameter, and its format."""

    how: Quantization
    whole: tuple[int, ...]
    box: Box

    @property
    def cell(self) -> tuple[int, ...]:
        return cell_of(self.how, self.whole)


Held: TypeAlias = Mapping[Kind, Sequence[str]]
"""The quantised parameters of one rank: names by kind, as layers are alike."""


class Shared(NamedTuple):
    """The shared scales of one parameter at one rank."""

    own: _Ints
    """The indices of the shared scales among those of its box."""
    at: _Ints
    """The positions of these in the vector."""


class Exchange(NamedTuple):
    """The exchange, as one rank takes part in it."""

    names: tuple[str, ...]
    """The names of all parameters of all ranks, sorted."""
    shared: dict[str, Shared]
    length: int
    """The length of the vector."""


def exchange_of(ranks: Sequence[Held], rank: int) -> Exchange:
    """Derives the exchange of a rank from what all ranks have.

    Ranks with the same box have the same values, and exchange nothing between each other. Raises
    WeightsMismatch if ranks do not quantise alike, and InvalidArgument if a scale covers elements
    that none of these ranks has.
    """
    kinds: dict[Kind, int] = {}
    having: dict[str, list[int]] = {}  # the kinds of each name
    for held in ranks:
        for kind, names in held.items():
            number = kinds.setdefault(kind, len(kinds))
            for name in names:
                having.setdefault(name, []).append(number)
    known = list(kinds)
    ours = {name: kind for kind, names in ranks[rank].items() for name in names}
    found: dict[tuple[int, ...], _Ints] = {}
    shared: dict[str, Shared] = {}
    length = 0
    for name in sorted(having):
        alike = tuple(having[name])
        if alike not in found:
            found[alike] = _shared(name, [known[number] for number in alike])
        cells = found[alike]
        if name in ours:
            scales = cells_of(ours[name].cell, ours[name].box)
            inside = (cells >= scales.offset) & (cells < np.add(scales.offset, scales.shape))
            at = np.flatnonzero(inside.all(axis=1))
            if len(at):
                local = cells[at] - np.array(scales.offset)
                own = np.ravel_multi_index(tuple(local.T), scales.shape)
                shared[name] = Shared(own.astype(np.int64), at + length)
        length += len(cells)
    return Exchange(tuple(sorted(having)), shared, length)


def _shared(name: str, kinds: Sequence[Kind]) -> _Ints:
    """Returns the cells in which more than one box has elements, `[cells, dimensions]`."""
    how, whole, _ = kinds[0]
    for kind in kinds:
        if (kind.how, kind.whole) != (how, whole):
            raise WeightsMismatch(
                f"{name} is quantised as {how} of {list(whole)} at one training rank and as "
                f"{kind.how} of {list(kind.whole)} at another; pass the same `quantize` at all"
            )
    cell, boxes = kinds[0].cell, sorted({kind.box for kind in kinds})
    everything = Box((0,) * len(whole), whole)
    grid = cells_of(cell, everything).shape
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
    if ((had > 0) & (had < _elements(cell, everything))).any():
        raise InvalidArgument(
            f"{name} has scales of elements that no rank of this process group has; give the "
            "group of all training ranks that have a part of it"
        )
    return np.argwhere(times > 1)


def _within(cell: tuple[int, ...], box: Box) -> tuple[slice, ...]:
    scales = cells_of(cell, box)
    return tuple(
        slice(first, first + size) for first, size in zip(scales.offset, scales.shape, strict=True)
    )


def _elements(cell: tuple[int, ...], box: Box) -> _Ints:
    """Returns how many elements of each cell a box has."""
    along: list[_Ints] = []
    for size, first, length in zip(cell, box.offset, box.shape, strict=True):
        end = first + length
        begins = np.arange(first // size, -(-end // size), dtype=np.int64) * size
        along.append(np.minimum(begins + size, end) - np.maximum(begins, first))
    return reduce(np.multiply.outer, along)
