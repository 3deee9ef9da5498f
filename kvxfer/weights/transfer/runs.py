"""What one training rank writes to one inference rank, as runs of bytes.

A *run* is contiguous in the sender's box and in the receiver's. Both sides derive the same runs
from the plan: the sender writes them, and the digest is of them.
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
    """What a digest asks of a MemoryRegion."""

    def checksum(
        self,
        offsets: np.ndarray[tuple[int], np.dtype[np.int64]],
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        length: int,
    ) -> int: ...


class Stretch(NamedTuple):
    """Runs of one parameter that have one length, in bytes."""

    source: str
    """The parameter's name at training."""
    length: int
    source_offsets: _Ints
    """In the sender's box."""
    target_offsets: _Ints
    """In the arena."""

    @property
    def nbytes(self) -> int:
        return self.length * len(self.source_offsets)


def stretches_of(write: Write, held: Mapping[str, Holding], arena: Arena) -> Iterator[Stretch]:
    """Of one write; `held` has the boxes of its sender, `arena` is its receiver's."""
    for piece in write.pieces:
        place = arena.places[piece.parameter]
        yield _stretch(piece, held[piece.source], place.holding, place.offset)


def _stretch(piece: Piece, held: Holding, wanted: Holding, begin: int) -> Stretch:
    item = ITEM_BYTES[wanted.dtype]
    inner = len(piece.shape) - 1
    while inner > 0 and piece.shape[inner] == held.shape[inner] == wanted.shape[inner]:
        inner -= 1
    # Along `inner` and what follows it, the bytes are contiguous on both sides.
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
    """In elements, of each run: of the begin of a piece at `first` of a box, and along the outer
    dimensions of the piece, the last of them fastest."""
    strides = [1] * len(box)
    for dimension in reversed(range(len(box) - 1)):
        strides[dimension] = strides[dimension + 1] * box[dimension + 1]
    begin = sum(at * stride for at, stride in zip(first, strides, strict=True))
    offsets = np.array([begin], np.int64)
    for size, stride in zip(outer, strides, strict=False):
        offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return offsets


def source_digest(stretches: Iterable[Stretch], regions: Mapping[str, Region]) -> int:
    """The sum of XXH3 over the runs, each seeded with its place in the arena, of what is sent.
    Blocks; any thread."""
    return (
        sum(
            regions[each.source].checksum(each.source_offsets, each.target_offsets, each.length)
            for each in stretches
        )
        % _MODULUS
    )


def target_digest(stretches: Iterable[Stretch], arena: Region) -> int:
    """The same of what has arrived."""
    return (
        sum(
            arena.checksum(each.target_offsets, each.target_offsets, each.length)
            for each in stretches
        )
        % _MODULUS
    )
