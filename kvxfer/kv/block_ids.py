"""Block ids as they go over the wire."""

from __future__ import annotations

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.kv.block_pool import BlockIds


def pack_block_table(ids: BlockIds) -> bytes:
    """A block table as it goes over the wire: little-endian int32."""
    return ids.astype("<i4", copy=False).tobytes()


def unpack_block_table(table: bytes, num_blocks: int) -> BlockIds:
    """The block ids of a table of a pool of `num_blocks`.

    Raises InvalidArgument for an empty or ragged table, an id outside the pool, or one that is
    there twice.
    """
    if not table or len(table) % 4:
        raise InvalidArgument(
            f"a block table of {len(table)} bytes; send 4 bytes for each of at least one block"
        )
    ids = np.frombuffer(table, dtype="<i4").astype(np.int32, copy=False)
    outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
    if len(outside):
        raise InvalidArgument(
            f"block {int(ids[outside[0]])} of the block table is outside the pool; "
            f"its blocks are 0 to {num_blocks - 1}"
        )
    unique, times = np.unique(ids, return_counts=True)
    if len(unique) != len(ids):
        raise InvalidArgument(
            f"block {int(unique[times > 1][0])} is in the block table {int(times.max())} times; "
            "a block receives one part of the cache only"
        )
    return ids
