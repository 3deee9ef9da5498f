"""An oracle for schedules, which knows every element of a model by its name.

The memory of each rank is arrays of identities, one number for each element of each storage. The
writes of a schedule copy identities between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from kvxfer.weights.maps import Parameters, Side, WeightMap
from kvxfer.weights.plan.schedule import Schedule

NOTHING = -1


def boxes(side: Side) -> Iterator[tuple[int, str, tuple[slice, ...], Parameters]]:
    """Yields rank, name and box of all that the side keeps, without the planner's code."""
    for parameters in side.parameters:
        ranges = {index: range(*ends) for index, ends in parameters.each.items()}
        for values in itertools.product(*ranges.values()):
            own = dict(zip(ranges, values, strict=True))
            name = parameters.name.format(**own)
            for rank, at in enumerate(itertools.product(*map(range, side.mesh.values()))):
                where = dict(zip(side.mesh, at, strict=True))
                if (box := box_of(side, parameters, own, rank, where)) and all(
                    part.start < part.stop for part in box
                ):
                    yield rank, name, box, parameters


def box_of(
    side: Side, parameters: Parameters, values: dict[str, int], rank: int, where: dict[str, int]
) -> tuple[slice, ...] | None:
    if parameters.parts:
        for part in parameters.parts:
            if rank in part.ranks:
                return tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))
        return None
    if any(where[axis] != coordinate for axis, coordinate in parameters.only.items()):
        return None
    for index, axes in parameters.owner.items():
        first, end = parameters.each[index]
        mine, size = number(side, axes, where)
        if (values[index] - first) * size // (end - first) != mine:
            return None
    found = []
    for dimension, length in enumerate(parameters.shape):
        mine, parts = number(side, parameters.split[dimension] if parameters.split else (), where)
        each = -(-length // parts)
        found.append(slice(min(length, mine * each), min(length, (mine + 1) * each)))
    return tuple(found)


def number(side: Side, axes: tuple[str, ...], where: dict[str, int]) -> tuple[int, int]:
    """Returns the coordinate along axes taken as one, and their size."""
    mine, size = 0, 1
    for axis in axes:
        mine, size = mine * side.mesh[axis] + where[axis], size * side.mesh[axis]
    return mine, size


class Model:
    """The identities of all elements that the training ranks have, by storage."""

    def __init__(self, weights: WeightMap) -> None:
        self.weights = weights
        self.identities: dict[str, np.ndarray] = {}
        begin = 0
        for parameters in weights.train.parameters:
            for name in parameters.names():
                size = int(np.prod(parameters.shape))
                whole = np.arange(begin, begin + size).reshape(parameters.shape)
                begin += size
                padding = parameters.padding or (0,) * len(parameters.shape)
                for dimension, pad in enumerate(padding):
                    if pad:  # padding has no identity
                        np.moveaxis(whole, dimension, 0)[-pad:] = NOTHING
                self.identities[name] = whole

    def train_memory(self) -> dict[tuple[int, str], np.ndarray]:
        return {
            (rank, name): self.identities[name][box].copy()
            for rank, name, box, _ in boxes(self.weights.train)
        }

    def wanted(self) -> dict[tuple[int, str], np.ndarray]:
        """Returns the memory that each inference rank has to have after an update."""
        infer, train = self.weights.infer, self.weights.train
        found = {}
        for rank, name, box, parameters in boxes(infer):
            if name in infer.tied:
                continue
            whole = np.full(parameters.shape, NOTHING)
            identities = self.identities[train.tied.get(name, name)]
            padding = parameters.padding or (0,) * len(parameters.shape)
            real = tuple(slice(n - p) for n, p in zip(parameters.shape, padding, strict=True))
            whole[real] = identities[real]
            found[rank, name] = whole[box]
        return found


def run(schedule: Schedule) -> tuple[dict[tuple[int, str], np.ndarray], np.ndarray]:
    """Returns the memory of inference after all writes; and the most times that an element was
    written, with the most bytes that a receiver gets in a burst. Raises KeyError if a rank writes
    what it does not hold."""
    weights = schedule.weights
    model = Model(weights)
    source = model.train_memory()
    memory = {key: np.full(each.shape, NOTHING) for key, each in model.wanted().items()}
    counts = {key: np.zeros(each.shape, int) for key, each in memory.items()}
    received: dict[tuple[int, int], int] = {}
    for sender in range(weights.train.ranks):
        for write in schedule.writes_of(sender):
            nbytes = 0
            for piece in write.pieces:
                shape = piece.shape
                here = tuple(
                    slice(o, o + n) for o, n in zip(piece.source_offset, shape, strict=True)
                )
                there = tuple(
                    slice(o, o + n) for o, n in zip(piece.target_offset, shape, strict=True)
                )
                whole = tuple(slice(o, o + n) for o, n in zip(piece.offset, shape, strict=True))
                taken = source[sender, piece.source][here]
                assert taken.shape == shape
                assert (taken == model.identities[piece.source][whole]).all()
                memory[write.receiver, piece.parameter][there] = taken
                counts[write.receiver, piece.parameter][there] += 1
                nbytes += taken.size * item_bytes(weights, piece.parameter)
            assert nbytes == write.nbytes > 0
            key = (write.receiver, write.burst)
            received[key] = received.get(key, 0) + nbytes
    most = np.array([count.max(initial=0) for count in counts.values()])
    return memory, np.array([most.max(initial=0), max(received.values(), default=0)])


def item_bytes(weights: WeightMap, name: str) -> int:
    return next(each.item_bytes for each in weights.infer.parameters if name in each.names())
