"""The settings of the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvxfer.layout import KvLayout
from kvxfer.reference.config import DEMO_CONFIG, LlamaConfig

BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """A model with seeded weights, and the requests to it."""

    config: LlamaConfig
    dtype: str
    gpu: int | None
    """The GPU. None takes the CPU, for machines without a GPU; its figures mean nothing."""
    lengths: tuple[int, ...]
    """The lengths of the prompts, in tokens."""
    repeats: int
    fabrics: tuple[str, ...] = ("local", "tcp")
    tokens: int = 8
    """The number of output tokens, which are compared with one process's."""

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
        """Returns the blocks of a prompt and its output."""
        return -(-(length + self.tokens) // BLOCK_SIZE)

    @property
    def blocks(self) -> int:
        """The blocks of a cache: two of the longest prompts."""
        return 2 * self.blocks_for(max(self.lengths))


def on_gpu(repeats: int) -> Settings:
    """Returns a model of 1.1 billion parameters: 64 KiB of KV cache for each token."""
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
    """Returns settings that take seconds on a CPU; they only show that it works."""
    return Settings(DEMO_CONFIG, "float32", None, (40, 100), 2)
