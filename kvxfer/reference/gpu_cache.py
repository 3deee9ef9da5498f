"""The paged KV cache in memory of a GPU: kernels store into it and attend to it.

Needs Triton. No call waits: reads and writes happen in the order of the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvxfer.kernels import paged_attention, store_tokens
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.kv_cache import PagedKvCache


class GpuKvCache(PagedKvCache):
    """A `PagedKvCache` whose planes are memory of a GPU, of the type that the model computes in."""

    def __init__(
        self,
        config: LlamaConfig,
        num_blocks: int,
        block_size: int,
        planes: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        super().__init__(config, num_blocks, block_size, planes)
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_size)
        self._paged = [(keys.view(shape), values.view(shape)) for keys, values in self.planes]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        store_tokens(*self._paged[layer], slots, keys, values)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        length: int,
    ) -> Tensor:
        del keys, values  # the cache has them
        return paged_attention(queries, *self._paged[layer], blocks, length)
