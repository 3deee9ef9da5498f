"""Reorders the heads of blocks into the cache's own order, in place."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.kernels.runs import copy_runs
from kvxfer.kv.plane_writes import Runs

if TYPE_CHECKING:
    from kvxfer.layout import HeadOrder, KvLayout


def permute_heads(
    layout: KvLayout,
    plane: torch.Tensor,
    block_stride: int,
    ids: torch.Tensor,
    arrived: HeadOrder,
    scratch: torch.Tensor,
) -> None:
    """Swaps tokens and heads of blocks whose heads lie in the order `arrived`.

    `plane` is a contiguous uint8 tensor whose block `b` begins at `b * block_stride`; `ids` are
    [blocks], int32, each of them once. `scratch` is another such tensor of at least one block
    (`layout.part_bytes`): as many blocks as it holds are copied through it at a time. Raises
    InvalidArgument for a smaller one.
    """
    if arrived == layout.order:
        return
    part = layout.part_bytes
    at_once = scratch.numel() // part
    if at_once == 0:
        raise InvalidArgument(
            f"scratch of {scratch.numel()} bytes for blocks of {part}; pass at least one block's"
        )
    swapped, back = _there_and_back(layout, arrived, block_stride)
    places = torch.arange(at_once, dtype=torch.int32, device=ids.device)
    for begin in range(0, len(ids), at_once):
        some = ids[begin : begin + at_once]
        here = places[: len(some)]
        copy_runs(swapped, plane, some, scratch, here)
        copy_runs(back, scratch, here, plane, some)


@lru_cache(maxsize=256)
def _there_and_back(layout: KvLayout, arrived: HeadOrder, block_stride: int) -> tuple[Runs, Runs]:
    """Returns the runs from blocks in one order to packed blocks in the other, and those back."""
    vector, part = layout.vector_bytes, layout.part_bytes
    tokens, heads = layout.block_size, layout.heads_per_rank
    outer, inner = (heads, tokens) if arrived == "HND" else (tokens, heads)
    before = np.arange(part // vector).reshape(-1, outer, inner).swapaxes(1, 2).ravel()
    rows = np.zeros((len(before), 4), dtype=np.int64)
    rows[:, 1] = before * vector
    rows[:, 3] = np.arange(len(before)) * vector
    back = Runs(part, 1, 1, part, block_stride, np.zeros((1, 4), dtype=np.int64))
    return Runs(vector, 1, 1, block_stride, part, rows), back
