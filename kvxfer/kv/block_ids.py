"""Block tables, in memory and over the wire: a row of block ids for each KV cache group."""

from __future__ import annotations

from typing import Final

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.kv.block_pool import BlockIds
from kvxfer.layout import KvLayout

ABSENT: Final = -1
"""In the place of a block that its group does not have: it is outside of a sliding window."""


def by_group(ids: BlockIds, layout: KvLayout) -> BlockIds:
    """The same ids with a row for each group; one row may come without its second dimension.

    Raises InvalidArgument where the layout has another number of groups.
    """
    table = np.atleast_2d(ids)
    if len(table) != layout.num_groups:
        raise InvalidArgument(
            f"a block table for {len(table)} KV cache groups of a cache with {layout.num_groups}; "
            "pass the blocks of each group"
        )
    return table


def pack_block_table(ids: BlockIds) -> bytes:
    """A block table as it goes over the wire: little-endian int32, row by row."""
    return ids.astype("<i4", copy=False).tobytes()


def unpack_block_table(table: bytes, num_blocks: int, layout: KvLayout) -> BlockIds:
    """The block ids of a table of a pool of `num_blocks`, with a row for each group of the layout.

    Raises InvalidArgument for an empty or ragged table, an id outside the pool, or one that is
    there twice.
    """
    groups = layout.num_groups
    if not table or len(table) % (4 * groups):
        of = f" for each of {groups} KV cache groups" if groups > 1 else ""
        raise InvalidArgument(
            f"a block table of {len(table)} bytes; send 4 bytes for each of at least one block{of}"
        )
    ids = np.frombuffer(table, dtype="<i4").astype(np.int32, copy=False)
    present = ids[ids != ABSENT] if layout.layer_groups else ids
    outside = np.flatnonzero((present < 0) | (present >= num_blocks))
    if len(outside):
        raise InvalidArgument(
            f"block {int(present[outside[0]])} of the block table is outside the pool; "
            f"its blocks are 0 to {num_blocks - 1}"
        )
    unique, times = np.unique(present, return_counts=True)
    if len(unique) != len(present):
        raise InvalidArgument(
            f"block {int(unique[times > 1][0])} is in the block table {int(times.max())} times; "
            "a block receives one part of the cache only"
        )
    rows = ids.reshape(groups, -1)
    if (rows == ABSENT).all(axis=1).any():
        raise InvalidArgument("a block table without a block of one KV cache group; send some")
    return rows
