"""The runs of bytes that one training rank writes to one inference rank.

A *run* is contiguous in the sender's box and in the receiver's. Both sides derive the same runs
from the plan: the sender writes them, and the digest covers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvxfer.layout import ITEM_BYTES
from kvxfer.weights.holdings import Holding
from kvxfer.weights.plan.schedule import Piece, Write
from kvxfer.weights.transfer.arena import Arena

_Ints: TypeAlias = NDArray[np.int64]
_MODULUS = 1 << 64


class Region(Protocol):
    """The method of a MemoryRegion that a digest needs."""

    def checksum(
        self,
        offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        length: int,
    ) -> int: ...


class Stretch(NamedTuple):
    """Runs of one parameter that all have the same length, in bytes."""

    source: str
    """The parameter's name at training."""
    length: int
    source_offsets: _Ints
    """Byte offsets in the sender's box."""
    target_offsets: _Ints
    """Byte offsets in the arena."""

    @property
    def nbytes(self) -> int:
        return self.length * len(self.source_offsets)


def stretches_of(write: Write, held: Mapping[str, Holding], arena: Arena) -> Iterator[Stretch]:
    """Yields the stretches of a write; `held` has its sender's boxes, `arena` is its receiver's."""
    for piece in write.pieces:
        place = arena.places[piece.parameter]
        yield _stretch(piece, held[piece.source], place.holding, place.offset)


def _stretch(piece: Piece, held: Holding, wanted: Holding, begin: int) -> Stretch:
    item = ITEM_BYTES[wanted.dtype]
    inner = len(piece.shape) - 1
    while inner > 0 and piece.shape[inner] == held.shape[inner] == wanted.shape[inner]:
        inner -= 1
    # The bytes are contiguous on both sides from dimension `inner` on.
    length = item
    for size in piece.shape[inner:]:
        length *= size
    outer = piece.shape[:inner]
    return Stretch(
        piece.source,
        length,
        _offsets(piece.source_offset, held.shape, outer) * item,
        _offsets(piece.target_offset, wanted.shape, outer) * item + begin,
    )


def _offsets(first: tuple[int, ...], box: tuple[int, ...], outer: tuple[int, ...]) -> _Ints:
    """Returns the offset of each run, in elements, of a piece that begins at `first` of a box.
    There is a run for each element along the outer dimensions, the last of them fastest."""
    strides = [1] * len(box)
    for dimension in reversed(range(len(box) - 1)):
        strides[dimension] = strides[dimension + 1] * box[dimension + 1]
    begin = sum(at * stride for at, stride in zip(first, strides, strict=True))
    offsets = np.array([begin], np.int64)
    for size, stride in zip(outer, strides, strict=False):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets


def source_digest(stretches: Iterable[Stretch], regions: Mapping[str, Region]) -> int:
    """Returns the digest of what is sent: the sum of XXH3 over the runs, each seeded with its
    offset in the arena, modulo 2**64. Blocks; any thread."""
    return (
        sum(
            regions[each.source].checksum(each.source_offsets, each.target_offsets, each.length)
            for each in stretches
        )
        % _MODULUS
    )


def target_digest(stretches: Iterable[Stretch], arena: Region) -> int:
    """Returns the same digest of what has arrived. Blocks; any thread."""
    return (
        sum(
            arena.checksum(each.target_offsets, each.target_offsets, each.length)
            for each in stretches
        )
        % _MODULUS
    )
