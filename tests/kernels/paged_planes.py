"""Planes of a paged KV cache, and attention over them by torch in float64."""

from __future__ import annotations

import torch

from tests.kernels.tensors import DEVICE


def planes(
    blocks: int, block_size: int, kv_heads: int, head_size: int, dtype: torch.dtype, gap: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V with random contents, and a gap of `gap` items between two blocks."""
    generator = torch.Generator().manual_seed(7)
    items = block_size * kv_heads * head_size
    made = (torch.randn(blocks, items + gap, generator=generator).to(dtype) for _ in range(2))
    keys, values = (
        each.to(DEVICE)[:, :items].unflatten(1, (block_size, kv_heads, head_size)) for each in made
    )
    return keys, values


def sequence(plane: torch.Tensor, blocks: list[int], length: int) -> torch.Tensor:
    """Returns the part of a plane that is a sequence, [length, kv_heads, head_size]."""
    return plane[blocks].flatten(0, 1)[:length]


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the attention of the last queries of a sequence, each up to its position."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * queries.shape[2] ** -0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    hidden = hidden.triu(scores.shape[2] - scores.shape[1] + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)
