"""Boxes of a parameter: which one each rank has, and where two sets of them meet.

A box is an int64 array `[dimensions, 2]`: along each dimension its first element and the one after
its last.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.weights.maps import Parameters, Side

Ints: TypeAlias = NDArray[np.int64]


class Pattern(NamedTuple):
    """The boxes that the ranks of a side have of a parameter."""

    boxes: Ints
    """`[boxes, dimensions, 2]`, each once, within the trained shape."""
    ranks: tuple[tuple[int, ...], ...]
    """The ranks that have each box, in order."""
    whole: Mapping[int, Ints]
    """The box of each rank, with padding."""


def pattern_of(side: Side, parameters: Parameters, coordinates: Mapping[str, int]) -> Pattern:
    """Returns the pattern of parameters with these coordinates along the axes of `owner`."""
    if parameters.parts:
        ranks = [rank for part in parameters.parts for rank in part.ranks]
        boxes = np.array(
            [
                [(first, first + size) for first, size in zip(part.offset, part.shape, strict=True)]
                for part in parameters.parts
                for _ in part.ranks
            ],
            dtype=np.int64,
        ).reshape(len(ranks), len(parameters.shape), 2)
    else:
        ranks, boxes = _of_mesh(side, parameters, {**coordinates, **parameters.only})
    whole = dict(zip(ranks, boxes, strict=True))
    clipped = np.minimum(boxes, np.array(parameters.trained_shape)[:, None])
    kept = np.flatnonzero((clipped[:, :, 0] < clipped[:, :, 1]).all(axis=1))
    distinct, which = np.unique(clipped[kept], axis=0, return_inverse=True)
    holders: list[list[int]] = [[] for _ in distinct]
    for at, box in zip(kept.tolist(), which.reshape(-1).tolist(), strict=True):
        holders[box].append(ranks[at])
    return Pattern(distinct, tuple(tuple(sorted(each)) for each in holders), whole)


def _of_mesh(side: Side, parameters: Parameters, at: Mapping[str, int]) -> tuple[list[int], Ints]:
    """Returns the ranks at these coordinates, and the box of each."""
    axes = list(side.mesh)
    place: Any = tuple(at.get(axis, slice(None)) for axis in axes)
    numbers = np.arange(side.ranks).reshape(tuple(side.mesh.values()))[place].reshape(-1)
    coordinates = dict(zip(axes, np.unravel_index(numbers, tuple(side.mesh.values())), strict=True))
    boxes = np.empty((len(numbers), len(parameters.shape), 2), np.int64)
    split = parameters.split or ((),) * len(parameters.shape)
    for dimension, (size, along) in enumerate(zip(parameters.shape, split, strict=True)):
        part, parts = np.zeros(len(numbers), np.int64), 1
        for axis in along:
            part = part * side.mesh[axis] + coordinates[axis]
            parts *= side.mesh[axis]
        length = -(-size // parts)
        boxes[:, dimension, 0] = np.minimum(part * length, size)
        boxes[:, dimension, 1] = np.minimum((part + 1) * length, size)
    return numbers.tolist(), boxes


def disjoint(pattern: Pattern) -> Pattern:
    """Returns the pattern with overlapping boxes cut along each other's edges."""
    boxes = pattern.boxes
    if not _overlap(boxes):
        return pattern
    edges = [np.unique(boxes[:, dimension]) for dimension in range(boxes.shape[1])]
    spans = [np.stack([each[:-1], each[1:]], axis=1) for each in edges]
    cells, ranks = [], []
    for cell in product(*spans):
        box = np.array(cell)
        inside = (boxes[:, :, 0] <= box[:, 0]) & (box[:, 1] <= boxes[:, :, 1])
        holders = {r for at in np.flatnonzero(inside.all(axis=1)) for r in pattern.ranks[at]}
        if holders:
            cells.append(box)
            ranks.append(tuple(sorted(holders)))
    return Pattern(np.stack(cells), tuple(ranks), pattern.whole)


def _overlap(boxes: Ints) -> bool:
    """Returns whether any two boxes overlap."""
    for at, box in enumerate(boxes):
        later = boxes[at + 1 :]
        if (
            (np.maximum(later[:, :, 0], box[:, 0]) < np.minimum(later[:, :, 1], box[:, 1]))
            .all(axis=1)
            .any()
        ):
            return True
    return False


def meetings(held: Ints, wanted: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns where boxes meet: indices into `held` and `wanted`, and the common boxes."""
    first = np.maximum(held[:, None, :, 0], wanted[None, :, :, 0])
    end = np.minimum(held[:, None, :, 1], wanted[None, :, :, 1])
    which = np.nonzero((first < end).all(axis=2))
    return which[0], which[1], np.stack([first[which], end[which]], axis=2)


def volumes(boxes: Ints) -> Ints:
    """Returns the number of elements of each box."""
    found: Ints = np.prod(boxes[..., 1] - boxes[..., 0], axis=-1, dtype=np.int64)
    return found


def said(box: Ints) -> str:
    """Writes a box as a Python slice."""
    return "[" + ", ".join(f"{first}:{end}" for first, end in box.tolist()) + "]"
