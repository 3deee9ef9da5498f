"""A KV cache in memory of a GPU, beside a model that computes on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvxfer.kv import KvCache
from kvxfer.layout import Part
from kvxfer.reference.kv_cache import PagedKvCache

_PARTS: Final[tuple[Part, Part]] = ("K", "V")


class GpuBlocks:
    """A copier of blocks between the planes that the model computes with and the same blocks of
    `cache`.

    Calls return when the copy is done. Different threads may copy different blocks.
    """

    def __init__(self, cache: KvCache, computed: PagedKvCache) -> None:
        self._cache, self._computed = cache, computed

    def push(self, layer: int, blocks: Sequence[int]) -> None:
        """Copies blocks of a layer to the GPU, before they are sent."""
        for part, plane in zip(_PARTS, self._computed.planes[layer], strict=True):
            there = self._cache.plane(layer, part)
            rows = plane.view(self._computed.num_blocks, -1).numpy()
            for block in blocks:
                there.region.write(rows[block], there.offset + block * there.block_stride)

    def pull(self, blocks: Sequence[int]) -> None:
        """Copies blocks of all layers from the GPU, once they have been received."""
        for layer, planes in enumerate(self._computed.planes):
            for part, plane in zip(_PARTS, planes, strict=True):
                there = self._cache.plane(layer, part)
                rows = plane.view(self._computed.num_blocks, -1).numpy()
                for block in blocks:
                    there.region.read(rows[block], there.offset + block * there.block_stride)
