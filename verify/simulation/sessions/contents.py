"""The contents of caches. The bytes of a transfer are unique and do not depend on the layout."""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import numpy as np

from kvxfer.kv.block_pool import BlockIds
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.cache import KvCache, _blocks_of
from kvxfer.layout import KvLayout

Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


def make(seed: str, layout: KvLayout, tokens: int) -> Array:
    """Returns bytes of the whole model by layer, K and V, token, head."""
    shape = (layout.num_layers, layout.vectors, tokens, layout.num_kv_heads, layout.vector_bytes)
    data = random.Random(seed).randbytes(int(np.prod(shape)))
    return np.frombuffer(data, np.uint8).reshape(shape)


class Contents:
    """One rank's cache by layer: arrays [block, token, head, byte] of K and V."""

    def __init__(self, cache: KvCache) -> None:
        layout = self._layout = cache.layout
        self._by_layer: list[list[Array]] = []
        for layer in cache.planes:
            vectors: list[Array] = []
            for plane in layer:
                found = _blocks_of(plane, cache, layout.order)
                if layout.order == "HND":
                    found = found.swapaxes(2, 3)
                vectors += (found[:, index] for index in range(found.shape[1]))
            self._by_layer.append(vectors)
        first = layout.first_head
        self._heads = slice(first, first + layout.heads_per_rank)

    def put(self, data: Array, layer: int, table: BlockIds, begin: int, end: int) -> None:
        """Writes the bytes of a layer into blocks `begin` to `end` of the prompt."""
        size = self._layout.block_size
        row = table[self._layout.group_of(layer)].tolist()
        for vector, array in enumerate(self._by_layer[layer]):
            for index in range(begin, end):
                part = self._part(data, layer, vector, index * size)
                if row[index] != ABSENT:
                    array[row[index], : len(part)] = part

    def differs(self, data: Array, table: BlockIds, begin: int) -> str:
        """Returns the first wrong place in the blocks from block `begin` of the prompt on; empty if
        all are right."""
        size = self._layout.block_size
        for layer, vectors in enumerate(self._by_layer):
            blocks = table[self._layout.group_of(layer)].tolist()
            for vector, array in enumerate(vectors):
                for index, block in enumerate(blocks):
                    part = self._part(data, layer, vector, (begin + index) * size)
                    if block != ABSENT and not np.array_equal(array[block, : len(part)], part):
                        return f"layer {layer}, {'KV'[vector]}, block {block}"
        return ""

    def _part(self, data: Array, layer: int, vector: int, token: int) -> Array:
        """Returns the part of a block from a token on, of this rank's layers and heads."""
        tokens = slice(token, token + self._layout.block_size)
        part: Array = data[self._layout.first_layer + layer, vector, tokens, self._heads]
        return part
