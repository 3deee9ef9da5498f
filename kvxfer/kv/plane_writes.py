"""A plan between two real caches: the writes of each layer, for any block tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.kv.plan import StridedCopy, TransferPlan

if TYPE_CHECKING:
    from kvxfer.engine import MemoryRegion
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.cache import KvCache
    from kvxfer.kv.messages import Hello

Offsets: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """All runs of one length between two planes, which are those of a cycle again and again.

    Equal for every layer whose blocks lie equally far apart; compared by identity.
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
    ) -> tuple[Offsets, Offsets]:
        """Where each run begins in prefill's plane and in decode's, in the order of the tokens.

        Prefill's table begins with the prompt, decode's with `first_block` of it. Runs of blocks
        that they have not are left out: the last cycle may be filled in part. `only` keeps those
        out of some of prefill's blocks. Raises InvalidArgument where decode has a block that is
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
        )


@dataclass(frozen=True, slots=True)
class PlaneWrite:
    """The runs of one layer, with everything but the block tables.

    `src_offset` is where prefill's plane begins in its memory region. `dst` is an index into
    Offer.grants, of which each begins at the lowest block offered of the layer's `group`.
    """

    src: MemoryRegion
    src_offset: int
    dst: int
    group: int
    runs: Runs


def bind_plan(plan: TransferPlan, src: KvCache, dst: Hello) -> tuple[tuple[PlaneWrite, ...], ...]:
    """The writes of a plan between two real caches, by prefill layer.

    Grants are counted over the parts of the layers that the plan writes to.
    """
    known: dict[tuple[StridedCopy, int, int], list[Runs]] = {}
    writes: list[tuple[PlaneWrite, ...]] = [()] * plan.prefill.layers_per_rank
    for index, layer in enumerate(plan.layers):
        of_layer: list[PlaneWrite] = []
        for between in _by_planes(layer.copies):
            first = between[0]
            plane = src.plane(layer.src_layer, first.src_part)
            part = plan.decode.parts.index(first.dst_part)
            dst_stride = dst.block_strides[layer.dst_layer][part]
            key = (first, plane.block_stride, dst_stride)
            if key not in known:
                known[key] = list(_runs(plan, between, plane.block_stride, dst_stride))
            grant = index * len(plan.decode.parts) + part
            group = plan.prefill.group_of(layer.src_layer)
            of_layer += (
                PlaneWrite(plane.region, plane.offset, grant, group, runs) for runs in known[key]
            )
        writes[layer.src_layer] = tuple(of_layer)
    return tuple(writes)


def _by_planes(copies: tuple[StridedCopy, ...]) -> Iterator[list[StridedCopy]]:
    """The copies between each two planes."""
    for planes in dict.fromkeys((copy.src_part, copy.dst_part) for copy in copies):
        yield [copy for copy in copies if (copy.src_part, copy.dst_part) == planes]


def _runs(
    plan: TransferPlan, copies: list[StridedCopy], src_stride: int, dst_stride: int
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
            plan.src_blocks,
            plan.dst_blocks,
            src_stride,
            dst_stride,
            np.array(rows, dtype=np.int64),
        )
