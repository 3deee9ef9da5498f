"""The parameters of the fault tests: the values of each version, and the part of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvxfer.weights.holdings import Holding, Holdings

Array = NDArray[np.float32]

TRAINERS: Final = 3
INSTANCES: Final = {"pair": 2, "single": 1}
"""The number of ranks of each instance."""

ARENA_BYTES: Final = 1200 << 10
"""The arena of a rank that gets a model of 2.3 MB in waves."""
WAVES: Final = 3
"""The number of waves with such an arena."""

_SHAPES: Final = {"embed": (768, 256), "norm": (256,), "qkv": (512, 256), "down": (256, 1024)}


def whole(version: int) -> dict[str, Array]:
    """Returns every parameter of a version. Instances begin with version 0."""
    random = np.random.default_rng(version)
    return {
        name: random.standard_normal(shape, dtype=np.float32) for name, shape in _SHAPES.items()
    }


def held(rank: int) -> Holdings:
    """Returns the rows that a training rank holds."""
    return _split(rank, TRAINERS, 0)


def wanted(instance: str, rank: int) -> Holdings:
    """Returns the columns that an inference rank wants; of a vector, its part of the elements."""
    return _split(rank, INSTANCES[instance], 1)


def _split(rank: int, ranks: int, dimension: int) -> Holdings:
    found = []
    for name, shape in _SHAPES.items():
        along = min(dimension, len(shape) - 1)
        first, end = (shape[along] * at // ranks for at in (rank, rank + 1))
        offset, box = [0] * len(shape), [*shape]
        offset[along], box[along] = first, end - first
        found.append(Holding(name, "float32", shape, tuple(offset), tuple(box)))
    return Holdings(tuple(found))


def boxes(holdings: Holdings, of: Mapping[str, Array]) -> dict[str, Array]:
    """Returns a copy of a rank's part of these parameters."""
    return {
        each.name: of[each.name][
            tuple(
                slice(first, first + size)
                for first, size in zip(each.offset, each.shape, strict=True)
            )
        ].copy()
        for each in holdings.parameters
    }
