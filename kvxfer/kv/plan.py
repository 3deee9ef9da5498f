"""The byte ranges of prefill's blocks and their places in decode's, for one rank of each.

Block sizes may differ, so a plan is made for a *cycle*: the fewest tokens that fill whole blocks of
a layer on both sides. In the last cycle of a prompt only the copies whose blocks exist are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from kvxfer.kv.ranks import heads_between, layers_between, require_mappable
from kvxfer.layout import HeadOrder, KvLayout, Part


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`count` runs of `length` bytes from a block of a prefill plane to a block of a decode plane.

    The blocks are entries of the block tables, counted from the first of the cycle on each side.
    Run `i` lies at `src_offset + i * src_stride` from the start of the prefill block and goes to
    `dst_offset + i * dst_stride` from the start of the decode block. The plane determines where a
    block is (`kvxfer.kv.cache.KvPlane`), so a plan holds for every pool of its layouts.
    """

    src_part: Part
    dst_part: Part
    length: int
    count: int = 1
    src_block: int = 0
    dst_block: int = 0
    src_offset: int = 0
    dst_offset: int = 0
    src_stride: int = 0
    dst_stride: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The copies of one layer, in the order of its tokens; layers are counted from 0 on each side's
    own rank."""

    src_layer: int
    dst_layer: int
    cycle_tokens: int
    copies: tuple[StridedCopy, ...]

    @property
    def bytes_per_cycle(self) -> int:
        return sum(copy.length * copy.count for copy in self.copies)

    @property
    def runs_per_cycle(self) -> int:
        return sum(copy.count for copy in self.copies)


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The copies from one prefill rank to one decode rank, for each prefill layer in turn.

    Without layers there is nothing to move between the two.
    """

    prefill: KvLayout
    decode: KvLayout
    arrival_order: HeadOrder
    """The order of the heads in decode's blocks when the last byte has arrived."""
    layers: tuple[LayerPlan, ...]

    @property
    def first_grants(self) -> tuple[int, ...]:
        """The index of the first grant of each layer, and at the end the number of grants: one for
        each plane that the layer has at decode."""
        decode = self.decode.of_layers
        planes = (len(decode[layer.dst_layer].parts) for layer in self.layers)
        return tuple(accumulate(planes, initial=0))

    @property
    def permutes(self) -> bool:
        """Whether decode then has to put the heads of its blocks into its own order."""
        return self.arrival_order != self.decode.order

    @property
    def cycle_tokens(self) -> int:
        """The tokens of a cycle of all layers together."""
        of_layers = {layer.cycle_tokens for layer in self.layers}
        return math.lcm(self.prefill.block_size, self.decode.block_size, *of_layers)

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes of cycle_tokens over all layers."""
        whole = self.cycle_tokens
        return sum(each.bytes_per_cycle * (whole // each.cycle_tokens) for each in self.layers)

    @property
    def runs_per_cycle(self) -> int:
        """Ranges of contiguous bytes of cycle_tokens over all layers."""
        whole = self.cycle_tokens
        return sum(each.runs_per_cycle * (whole // each.cycle_tokens) for each in self.layers)


@lru_cache(maxsize=1024)
def plan_transfer(
    prefill: KvLayout, decode: KvLayout, *, decode_permutes: bool = True
) -> TransferPlan:
    """Returns the plan of a pair of ranks. A pure function: both sides compute the same plan.

    `decode_permutes`: decode can reorder heads after arrival. Otherwise they are put in order on
    the way, in as many runs as that takes. Raises LayoutMismatch with the field that no plan can
    bridge.
    """
    require_mappable(prefill, decode)
    # Decode reorders the heads of a block in all layers. With several groups, the block of other
    # layers is not the transfer's; with several shapes, not all layers have heads.
    permutes = decode_permutes and not prefill.layer_groups and not prefill.shapes
    order = _arrival_order(prefill, decode) if permutes else decode.order

    @cache
    def of_shape(shape: int) -> tuple[int, tuple[StridedCopy, ...]]:
        ours, theirs = prefill.of_shape(shape), decode.of_shape(shape)
        arrives = replace(theirs, order=order) if permutes else theirs
        cycle = math.lcm(ours.block_size, theirs.block_size)
        if ours.state:
            return cycle, tuple(_copies_of_state(ours, arrives))
        packed = ours.opaque and ours.block_size != arrives.block_size
        copies = (_copies_of_packed if packed else _copies)(ours, arrives)
        last = ours.block_size // prefill.block_size - 1  # entry of a block that has several
        return cycle, tuple(
            replace(copy, src_block=last, dst_block=last) if last else copy for copy in copies
        )

    def of_layer(layer: int) -> LayerPlan:
        shape = prefill.layer_shapes[layer] if prefill.shapes else 0
        return LayerPlan(layer - prefill.first_layer, layer - decode.first_layer, *of_shape(shape))

    return TransferPlan(
        prefill=prefill,
        decode=decode,
        arrival_order=order,
        layers=tuple(map(of_layer, layers_between(prefill, decode))),
    )


def blocks_match(prefill: KvLayout, src_blocks: int, decode: KvLayout, dst_blocks: int) -> bool:
    """Whether there is a prompt that takes these numbers of blocks on the two sides."""
    least = max((src_blocks - 1) * prefill.block_size, (dst_blocks - 1) * decode.block_size)
    most = min(src_blocks * prefill.block_size, dst_blocks * decode.block_size)
    return least < most


def _arrival_order(prefill: KvLayout, decode: KvLayout) -> HeadOrder:
    """Returns the order in which prefill's bytes make the longest runs.

    A block of decode then arrives as if decode had that order, from any number of prefill ranks and
    blocks, so it is reordered in place, block by block. The result depends on nothing that differs
    among the ranks of an instance, so it is the same for all of them.
    """
    one_head, one_token = prefill.heads_per_rank == 1, prefill.block_size == 1
    if decode.heads_per_rank == 1 or decode.block_size == 1 or (one_head and one_token):
        return decode.order
    if one_head:
        return "HND"
    return "NHD" if one_token else prefill.order


class _Axis(NamedTuple):
    """A dimension of a copy: its extent, and the bytes from one item to the next on each side."""

    extent: int
    src: int
    dst: int


def _copies(src: KvLayout, dst: KvLayout) -> Iterator[StridedCopy]:
    """Yields the copies of one cycle of one layer."""
    heads = heads_between(src, dst)
    src_token, src_head = _strides(src)
    dst_token, dst_head = _strides(dst)
    for begin, end in _pieces(src, dst):
        axes = [
            _Axis(end - begin, src_token, dst_token),
            _Axis(len(heads), src_head, dst_head),
        ]
        src_offset = begin % src.block_size * src_token + (heads[0] - src.first_head) * src_head
        dst_offset = begin % dst.block_size * dst_token + (heads[0] - dst.first_head) * dst_head
        vectors = src.vectors
        if src.parts == dst.parts == ("KV",):  # K and V of a block are one more dimension
            axes.append(_Axis(vectors, src.part_bytes // vectors, dst.part_bytes // vectors))
            vectors = 1
        for vector in range(vectors):
            src_part, src_begin = _place(src, vector)
            dst_part, dst_begin = _place(dst, vector)
            first = StridedCopy(
                src_part=src_part,
                dst_part=dst_part,
                length=src.vector_bytes,
                src_block=begin // src.block_size,
                dst_block=begin // dst.block_size,
                src_offset=src_begin + src_offset,
                dst_offset=dst_begin + dst_offset,
            )
            yield from _along(axes, first)


def _copies_of_packed(src: KvLayout, dst: KvLayout) -> Iterator[StridedCopy]:
    """Yields the same between opaque layouts of one packing and different block sizes."""
    heads = heads_between(src, dst)
    src_head, dst_head = _strides(src)[1], _strides(dst)[1]
    for begin, end in _pieces(src, dst):
        src_begin, dst_begin = begin % src.block_size, begin % dst.block_size
        for vector, packing in enumerate(src.packings or ()):
            unit = packing.tokens * src.vector_bytes // 2 // packing.rows
            first = StridedCopy(
                src_part="KV",
                dst_part="KV",
                length=unit,
                src_block=begin // src.block_size,
                dst_block=begin // dst.block_size,
                src_offset=vector * src_head // 2
                + src_begin // packing.tokens * unit
                + (heads[0] - src.first_head) * src_head,
                dst_offset=vector * dst_head // 2
                + dst_begin // packing.tokens * unit
                + (heads[0] - dst.first_head) * dst_head,
            )
            axes = [
                _Axis((end - begin) // packing.tokens, unit, unit),
                _Axis(
                    packing.rows,
                    src.block_size // packing.tokens * unit,
                    dst.block_size // packing.tokens * unit,
                ),
                _Axis(len(heads), src_head, dst_head),
            ]
            yield from _along(axes, first)


def _copies_of_state(src: KvLayout, dst: KvLayout) -> Iterator[StridedCopy]:
    """Yields the same for a state, which is one for the whole block. In each section the heads that
    both ranks have are contiguous."""
    heads, item, before = heads_between(src, dst), src.item_bytes, 0
    for size in src.sections:
        first = StridedCopy(
            src_part="KV",
            dst_part="KV",
            length=size * item,
            src_offset=(src.heads_per_rank * before + (heads[0] - src.first_head) * size) * item,
            dst_offset=(dst.heads_per_rank * before + (heads[0] - dst.first_head) * size) * item,
        )
        yield from _along([_Axis(len(heads), size * item, size * item)], first)
        before += size


def _pieces(src: KvLayout, dst: KvLayout) -> Iterator[tuple[int, int]]:
    """Returns the tokens of a cycle, cut at each end of a block on either side."""
    cycle = math.lcm(src.block_size, dst.block_size)
    return pairwise(
        sorted({*range(0, cycle, src.block_size), *range(0, cycle, dst.block_size), cycle})
    )


def _along(axes: Sequence[_Axis], first: StridedCopy) -> Iterator[StridedCopy]:
    """Yields the longest runs that the axes allow, beginning with `first`."""
    length, inner, outer = _runs(first.length, axes)
    for at in product(*(range(axis.extent) for axis in outer)):
        yield replace(
            first,
            length=length,
            count=inner.extent,
            src_offset=first.src_offset + _dot(at, [axis.src for axis in outer]),
            dst_offset=first.dst_offset + _dot(at, [axis.dst for axis in outer]),
            src_stride=inner.src,
            dst_stride=inner.dst,
        )


def _strides(layout: KvLayout) -> tuple[int, int]:
    """Returns the bytes from token to token and from head to head within K or V of a block."""
    vector = layout.vector_bytes
    if layout.order == "HND":
        return vector, layout.block_size * vector
    return layout.heads_per_rank * vector, vector


def _place(layout: KvLayout, vector: int) -> tuple[Part, int]:
    """Returns the plane of K (0) or V (1), and the offset of K or V in a block of it."""
    if len(layout.parts) == 1:
        return layout.parts[0], vector * layout.part_bytes // 2
    return layout.parts[vector], 0


def _runs(length: int, axes: Sequence[_Axis]) -> tuple[int, _Axis, tuple[_Axis, ...]]:
    """Returns the longest runs that the axes allow: their length, the axis along which they repeat
    evenly, and the axes around that one."""
    left: list[_Axis] = []
    for axis in sorted(axes, key=lambda axis: axis.src):
        if axis.extent == 1:
            continue
        if not left and axis.src == axis.dst == length:
            length *= axis.extent
        elif left and (axis.src, axis.dst) == (
            left[-1].extent * left[-1].src,
            left[-1].extent * left[-1].dst,
        ):
            left[-1] = left[-1]._replace(extent=left[-1].extent * axis.extent)
        else:
            left.append(axis)
    inner = left[0] if left else _Axis(1, 0, 0)
    return length, inner, tuple(reversed(left[1:]))


def _dot(at: Sequence[int], strides: Sequence[int]) -> int:
    return sum(index * stride for index, stride in zip(at, strides, strict=True))
