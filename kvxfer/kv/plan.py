"""Which byte ranges of a prefill block go where in a decode block."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvxfer.errors import LayoutMismatch
from kvxfer.kv.layout import KvLayout, Part


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`count` runs of `length` bytes out of each block of a prefill plane into a decode plane.

    Run `i` lies at `src_offset + i * src_stride` from the start of the prefill block and goes to
    `dst_offset + i * dst_stride` from the start of the decode block. Where a block lies is the
    plane's business (`kvxfer.kv.cache.KvPlane`), so a plan holds for every pool of its layouts.
    """

    src_part: Part
    dst_part: Part
    length: int
    count: int = 1
    src_offset: int = 0
    dst_offset: int = 0
    src_stride: int = 0
    dst_stride: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The copies of one layer; layers are counted from 0 on each side's own rank."""

    src_layer: int
    dst_layer: int
    copies: tuple[StridedCopy, ...]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What moves from one prefill rank to one decode rank, for each prefill layer in turn."""

    prefill: KvLayout
    decode: KvLayout
    layers: tuple[LayerPlan, ...]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return sum(copy.length * copy.count for layer in self.layers for copy in layer.copies)


def plan_transfer(prefill: KvLayout, decode: KvLayout) -> TransferPlan:
    """The plan of a pair of ranks. A pure function: both sides compute the same plan.

    Raises LayoutMismatch with the first field in which the layouts differ.
    """
    for field in fields(KvLayout):
        ours, theirs = getattr(prefill, field.name), getattr(decode, field.name)
        if ours != theirs:
            raise LayoutMismatch(field.name, ours, theirs)
    whole_block = tuple(
        StridedCopy(src_part=part, dst_part=part, length=prefill.part_bytes)
        for part in prefill.parts
    )
    layers = tuple(
        LayerPlan(src_layer=layer, dst_layer=layer, copies=whole_block)
        for layer in range(prefill.layers_per_rank)
    )
    return TransferPlan(prefill=prefill, decode=decode, layers=layers)
