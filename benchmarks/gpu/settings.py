"""What is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.layout import KvLayout
from kvxfer.reference.config import DEMO_CONFIG, LlamaConfig

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """A model with seeded weights, and what is asked of it."""

    config: LlamaConfig
    dtype: str
    gpu: int | None
    """None measures nothing worth knowing: it is for machines without one."""
    lengths: tuple[int, ...]
    """Of the prompts, in tokens."""
    repeats: int
    fabrics: tuple[str, ...] = ("local", "tcp")
    tokens: int = 8
    """Of output, compared with those of one process."""

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            num_layers=self.config.num_layers,
            num_kv_heads=self.config.num_kv_heads,
            head_size=self.config.head_size,
            dtype=self.dtype,
            block_size=BLOCK_SIZE,
        )

    def blocks_for(self, length: int) -> int:
        """Of a prompt and its output."""
        return -(-(length + self.tokens) // BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """Of a cache: two of the longest prompts."""
        return 2 * self.blocks_for(max(self.lengths))


def on_gpu(repeats: int) -> Settings:
    """A model of 1.1 billion parameters: 64 KiB of KV cache for each token."""
    config = LlamaConfig(
        name="bench-gpu-16l",
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        head_size=128,
        max_position=16_384,
    )
    return Settings(config, "bfloat16", 0, (2048, 8192), repeats)


def smoke() -> Settings:
    """Seconds on a processor: whether it works at all."""
    return Settings(DEMO_CONFIG, "float32", None, (40, 100), 2)
