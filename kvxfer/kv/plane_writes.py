"""A plan between two real caches: the writes of each layer, for any block tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.kv.plan import LayerPlan, StridedCopy, TransferPlan

if TYPE_CHECKING:
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.cache import KvCache, KvPlane
    from kvxfer.kv.messages import Hello

Offsets: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

# The parts of a run's number, from the top: the layer, the Runs in the layer, the run in them.
_LAYER_BITS: Final = 48
_RUN_BITS: Final = 40


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """All runs of one length between two planes: those of a cycle, repeated. A cycle has
    `src_blocks` and `dst_blocks` entries of the block tables.

    Layers whose blocks are equally far apart share one object. Compared by identity.
    """

    length: int
    src_blocks: int
    dst_blocks: int
    src_stride: int
    dst_stride: int
    of_cycle: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    """A row for each run: prefill's block, its offset there, decode's block, its offset there."""

    def offsets(
        self,
        source: BlockIds,
        target: BlockIds,
        first_block: int = 0,
        only: range | None = None,
    ) -> tuple[Offsets, Offsets, Offsets]:
        """Returns the offset of each run in prefill's plane and in decode's, in the order of the
        tokens, and its number among all runs of a prompt, which is the same on both sides.

        Prefill's table begins with the prompt, decode's with its block `first_block`. Runs of
        blocks that are not in the tables are left out: the last cycle may be filled in part. `only`
        selects some of prefill's blocks. Raises InvalidArgument if decode has a block that is
        absent at prefill.
        """
        src_block, src_offset, dst_block, dst_offset = self.of_cycle.T
        cycle = np.arange(-(-len(source) // self.src_blocks), dtype=np.int64)[:, np.newaxis]
        src = cycle * self.src_blocks + src_block
        dst = cycle * self.dst_blocks + dst_block - first_block
        some = range(len(source)) if only is None else only
        there = (src >= some.start) & (src < some.stop) & (dst >= 0) & (dst < len(target))
        there[there] = target[dst[there]] >= 0
        src_ids = source.astype(np.int64)[src[there]]
        if len(src_ids) and src_ids.min() < 0:
            missing = int(src[there][src_ids.argmin()])
            raise InvalidArgument(
                f"room for block {missing} of the prompt, which prefill does not have; its layers "
                "have to have the same sliding window on both sides"
            )
        return (
            src_ids * self.src_stride + np.broadcast_to(src_offset, there.shape)[there],
            target.astype(np.int64)[dst[there]] * self.dst_stride
            + np.broadcast_to(dst_offset, there.shape)[there],
            np.flatnonzero(there),
        )


@dataclass(frozen=True, slots=True)
class PlaneWrite:
    """The runs of one layer, with everything but the block tables.

    `dst` is an index into Offer.grants; each grant begins at the lowest block offered of the
    layer's `group`. `first_number` is the number of the first run in a checksum.
    """

    src: KvPlane
    dst: int
    group: int
    runs: Runs
    first_number: int


@dataclass(frozen=True, slots=True)
class PlaneArrival:
    """The same runs in decode's plane."""

    plane: KvPlane
    group: int
    runs: Runs
    first_number: int


def bind_plan(plan: TransferPlan, src: KvCache, dst: Hello) -> tuple[tuple[PlaneWrite, ...], ...]:
    """Returns the writes of a plan between two real caches, by prefill layer.

    Grants are counted over the parts of the layers that the plan writes to.
    """

    decode = plan.decode.of_layers

    def dst_part(layer: LayerPlan, copy: StridedCopy) -> int:
        return decode[layer.dst_layer].parts.index(copy.dst_part)

    def strides(layer: LayerPlan, copy: StridedCopy) -> tuple[int, int]:
        src_stride = src.plane(layer.src_layer, copy.src_part).block_stride
        return src_stride, dst.block_strides[layer.dst_layer][dst_part(layer, copy)]

    first_grants = plan.first_grants
    writes: list[list[PlaneWrite]] = [[] for _ in range(plan.prefill.layers_per_rank)]
    for index, layer, copy, runs, number in _bound(plan, strides):
        plane = src.plane(layer.src_layer, copy.src_part)
        grant = first_grants[index] + dst_part(layer, copy)
        group = plan.prefill.group_of(layer.src_layer)
        write = PlaneWrite(plane, grant, group, runs, number)
        writes[layer.src_layer].append(write)
    return tuple(map(tuple, writes))


def bind_arrivals(plan: TransferPlan, dst: KvCache) -> Iterator[PlaneArrival]:
    """Yields the writes of bind_plan() as they arrive."""

    def strides(layer: LayerPlan, copy: StridedCopy) -> tuple[int, int]:
        return 0, dst.plane(layer.dst_layer, copy.dst_part).block_stride

    for _, layer, copy, runs, number in _bound(plan, strides):
        plane = dst.plane(layer.dst_layer, copy.dst_part)
        yield PlaneArrival(plane, plan.decode.group_of(layer.dst_layer), runs, number)


def _bound(
    plan: TransferPlan, strides: Callable[[LayerPlan, StridedCopy], tuple[int, int]]
) -> Iterator[tuple[int, LayerPlan, StridedCopy, Runs, int]]:
    """Yields all runs of a plan: the index of their layer, the layer, one of their copies, the
    runs, and the number of the first, which is the same on both sides."""
    known: dict[tuple[StridedCopy, int, int], list[Runs]] = {}
    for index, layer in enumerate(plan.layers):
        of_layer = itertools.count()
        for between in _by_planes(layer.copies):
            src_stride, dst_stride = strides(layer, between[0])
            key = (between[0], src_stride, dst_stride)
            if key not in known:
                cycle = layer.cycle_tokens
                blocks = cycle // plan.prefill.block_size, cycle // plan.decode.block_size
                known[key] = list(_runs(blocks, between, src_stride, dst_stride))
            for runs in known[key]:
                number = index << _LAYER_BITS | next(of_layer) << _RUN_BITS
                yield index, layer, between[0], runs, number


def _by_planes(copies: tuple[StridedCopy, ...]) -> Iterator[list[StridedCopy]]:
    """Yields the copies between each two planes."""
    for planes in dict.fromkeys((copy.src_part, copy.dst_part) for copy in copies):
        yield [copy for copy in copies if (copy.src_part, copy.dst_part) == planes]


def _runs(
    blocks: tuple[int, int], copies: list[StridedCopy], src_stride: int, dst_stride: int
) -> Iterator[Runs]:
    for length in dict.fromkeys(copy.length for copy in copies):
        rows = [
            (
                copy.src_block,
                copy.src_offset + run * copy.src_stride,
                copy.dst_block,
                copy.dst_offset + run * copy.dst_stride,
            )
            for copy in copies
            if copy.length == length
            for run in range(copy.count)
        ]
        yield Runs(
            length,
            *blocks,
            src_stride,
            dst_stride,
            np.array(rows, dtype=np.int64),
        )
