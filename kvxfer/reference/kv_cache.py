"""The paged KV cache as torch sees it: K and V planes over memory that another object may own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.attention import attend_causally, attend_one
from kvxfer.reference.config import LlamaConfig


class PagedKvCache:
    """K and V of all layers in blocks of `block_size` tokens.

    A layer has two planes, K and V, each contiguous
    [num_blocks, block_size, num_kv_heads, head_size]. `planes[layer]` is both, as tensors of that
    many items over memory such as `kvxfer.kv.cache.KvCache.buffer` gives out; without it torch
    allocates them, in float32. The cache does not know which blocks are free; its caller does.

    One thread at a time may write a given block; different blocks are independent.
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_blocks: int,
        block_size: int,
        planes: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InvalidArgument(
                f"a KV cache of {num_blocks} blocks of {block_size} tokens holds nothing"
            )
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks * block_size, config.num_kv_heads, config.head_size)
        if planes is None:
            planes = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.num_layers)]
        self._planes = [(keys.view(shape), values.view(shape)) for keys, values in planes]

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def planes(self) -> list[tuple[Tensor, Tensor]]:
        """K and V of each layer, [tokens of the cache, num_kv_heads, head_size]."""
        return self._planes

    def slots(self, blocks: Tensor, start: int, stop: int) -> Tensor:
        """Returns the slots in the planes of positions start..stop of a sequence, int64
        [stop - start], for its int64 block table."""
        positions = torch.arange(start, stop, device=blocks.device)
        return blocks[positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` and `values` [tokens, num_kv_heads, head_size] at int64 [tokens] slots."""
        key_plane, value_plane = self._planes[layer]
        key_plane.index_copy_(0, slots, keys)
        value_plane.index_copy_(0, slots, values)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        length: int,
    ) -> Tensor:
        """Returns the attention of the last positions of a sequence of `length`, [tokens, heads,
        head_size].

        `queries` are those of all positions, or of the last one alone. `keys` and `values` are
        those of the last positions, as passed to the last write() of this layer.
        """
        if len(keys) < length:
            keys, values = self.read(layer, blocks, length)
        if len(queries) > 1:
            return attend_causally(queries, keys, values)
        return attend_one(queries, keys, values)

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys and values of positions 0..length of a sequence, for its int64
        block table, each [length, num_kv_heads, head_size]."""
        used = blocks[: -(-length // self.block_size)]
        # On a matrix with a row per block, torch gathers by a memcpy per block; with a row per
        # token, or more dimensions, it takes a path that is five times slower.
        keys, values = (
            plane.view(self.num_blocks, -1).index_select(0, used).view(-1, *plane.shape[1:])
            for plane in self._planes[layer]
        )
        return keys[:length], values[:length]
