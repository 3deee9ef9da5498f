"""A KV cache in memory of a GPU, beside a model that computes on the processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvxfer.kv import KvCache
from kvxfer.layout import Part
from kvxfer.reference.kv_cache import PagedKvCache

_PARTS: Final[tuple[Part, Part]] = ("K", "V")


class GpuBlocks:
    """Copies blocks between the planes that the model computes with and the same blocks of `cache`.

    Each copy is waited for. Different blocks may be copied by different threads.
    """

    def __init__(self, cache: KvCache, computed: PagedKvCache) -> None:
        self._cache, self._computed = cache, computed

    def push(self, layer: int, blocks: Sequence[int]) -> None:
        """To the GPU, before they are sent."""
        for part, plane in zip(_PARTS, self._computed.planes[layer], strict=True):
            there = self._cache.plane(layer, part)
            rows = plane.view(self._computed.num_blocks, -1).numpy()
            for block in blocks:
                there.region.write(rows[block], there.offset + block * there.block_stride)

    def pull(self, blocks: Sequence[int]) -> None:
        """From the GPU, all layers, once they have been received."""
        for layer, planes in enumerate(self._computed.planes):
            for part, plane in zip(_PARTS, planes, strict=True):
                there = self._cache.plane(layer, part)
                rows = plane.view(self._computed.num_blocks, -1).numpy()
                for block in blocks:
                    there.region.read(rows[block], there.offset + block * there.block_stride)
