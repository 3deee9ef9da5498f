"""Attention in torch, on the processor."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes attention: queries [tokens, heads, head_size], keys and values [tokens, kv_heads,
    head_size] → [tokens, heads, head_size]; token i sees tokens 0..i."""
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        is_causal=True,
        enable_gqa=True,
    )
    return attended.squeeze(0).transpose(0, 1)


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes attention: query [1, heads, head_size], keys and values [tokens, kv_heads,
    head_size] → [1, heads, head_size]; the query sees all tokens."""
    _, kv_heads, head_size = keys.shape
    grouped = query.view(kv_heads, -1, head_size)
    scores = grouped @ keys.permute(1, 2, 0) * head_size**-0.5
    attended: Tensor = scores.softmax(dim=-1) @ values.transpose(0, 1)
    return attended.view(query.shape)
