"""A model that is small enough for every test of the reference engine."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvxfer.reference.config import LlamaConfig

TINY = LlamaConfig(
    name="tiny",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=256,
)
TINY_EXPERTS = replace(
    TINY, name="tiny-experts", intermediate_size=48, num_experts=8, experts_per_token=2
)


def shifted_planes(
    config: LlamaConfig, num_blocks: int, block_size: int, offset: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns zeroed planes of each layer, over memory that begins `offset` bytes late."""
    nbytes = num_blocks * block_size * config.num_kv_heads * config.head_size * 4

    def plane() -> torch.Tensor:
        return torch.frombuffer(bytearray(nbytes + offset), dtype=torch.float32, offset=offset)

    return [(plane(), plane()) for _ in range(config.num_layers)]
