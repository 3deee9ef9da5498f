"""The cut of a large box into slices of about equal size."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from kvxfer.weights.plan.boxes import Ints


class Cut(NamedTuple):
    """A box cut into a grid of slices, numbered with the last dimension fastest."""

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    """Slices along each dimension."""

    @property
    def slices(self) -> int:
        return math.prod(self.counts)

    def box(self, number: int, of: Ints) -> Ints:
        """Returns slice `number` of the box `of`, which has these lengths."""
        found = np.empty_like(of)
        for dimension in reversed(range(len(self.counts))):
            count, length = self.counts[dimension], self.lengths[dimension]
            number, at = divmod(number, count)
            found[dimension] = (length * at // count, length * (at + 1) // count)
            found[dimension] += of[dimension, 0]
        return found

    def elements(self) -> Ints:
        """Returns the number of elements of each slice."""
        found = np.ones(1, np.int64)
        for count, length in zip(self.counts, self.lengths, strict=True):
            edges = length * np.arange(count + 1) // count
            found = np.multiply.outer(found, np.diff(edges)).reshape(-1)
        return found


def cut(lengths: tuple[int, ...], most: int) -> Cut:
    """Cuts a box into slices of at most `most` elements, as equal as whole rows allow. It cuts only
    the outermost dimensions, so that the memory of a slice is contiguous."""
    counts = []
    inner = math.prod(lengths)
    for length in lengths:
        inner //= length
        counts.append(min(length, -(-length // max(1, most // inner))))
    return Cut(lengths, tuple(counts))
