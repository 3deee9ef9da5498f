"""Puts the heads of KV blocks that arrived in the other order into the cache's own, in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from kvxfer.kv.layout import HeadOrder, KvLayout

if TYPE_CHECKING:
    from kvxfer.kv.block_pool import BlockIds
    from kvxfer.kv.cache import KvCache, KvPlane

Permute: TypeAlias = Callable[["KvCache", "BlockIds", HeadOrder], None]
"""Called in a thread with blocks whose heads lie in the given order; touches no other blocks, and
returns when the last byte is in place."""

# What is copied aside at a time: it stays in the processor's cache.
_CHUNK_BYTES: Final = 1 << 20


def permute_on_host(cache: KvCache, blocks: BlockIds, arrived: HeadOrder) -> None:
    """`Permute` for a cache in host memory."""
    at_once = max(1, _CHUNK_BYTES // cache.layout.part_bytes)
    for plane in (plane for layer in cache.planes for plane in layer):
        before = _blocks_of(plane, cache, arrived)
        after = _blocks_of(plane, cache, cache.layout.order)
        for begin in range(0, len(blocks), at_once):
            some = blocks[begin : begin + at_once]
            after[some] = before[some].swapaxes(2, 3)


def _blocks_of(plane: KvPlane, cache: KvCache, order: HeadOrder) -> np.ndarray[Any, Any]:
    """A plane as [block, K or V, tokens, heads, bytes], with tokens and heads swapped for HND."""
    layout: KvLayout = cache.layout
    vector = layout.vector_bytes
    tokens, heads = layout.block_size, layout.heads_per_rank
    outer, inner = (heads, tokens) if order == "HND" else (tokens, heads)
    vectors = layout.part_bytes // (outer * inner * vector)
    memory = (ctypes.c_uint8 * plane.region.nbytes).from_address(plane.region.address)
    return np.ndarray(
        (cache.num_blocks, vectors, outer, inner, vector),
        dtype=np.uint8,
        buffer=np.ctypeslib.as_array(memory),
        offset=plane.offset,
        strides=(plane.block_stride, outer * inner * vector, inner * vector, vector, 1),
    )
