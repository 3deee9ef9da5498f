"""Which blocks of a prompt travel: those that decode needs to compute the prompt's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

NULL_BLOCK: Final = 0
"""vLLM's block in the place of those outside of a sliding window."""

BlockTable: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids of each KV cache group."""


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Of `block_size` tokens, in KV cache groups that have a sliding window of so many tokens, or
    None."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    last_tokens: int = 1
    """Of a prompt, those that decode computes itself: the last one, with a draft model of several
    modules as many as these read ahead."""

    def moved(self, prompt_tokens: int) -> int:
        """Tokens that come from prefill; none of a prompt that has no others."""
        return max(prompt_tokens - self.last_tokens, 0)

    def count(self, prompt_tokens: int) -> int:
        """Blocks until the last tokens."""
        return -(-max(self.moved(prompt_tokens), 1) // self.block_size)

    def first(self, group: int, prompt_tokens: int) -> int:
        """The first block that the last tokens attend to."""
        window = self.windows[group]
        if window is None:
            return 0
        return max(prompt_tokens - self.last_tokens + 1 - window, 0) // self.block_size

    def table(self, block_ids: Sequence[Sequence[int]], prompt_tokens: int) -> BlockTable:
        """Those that travel of the blocks of a prompt, as far as they are allocated. The others
        may have been given back, and hold something else."""
        count, table = self.count(prompt_tokens), []
        for group, ids in enumerate(block_ids):
            first = min(self.first(group, prompt_tokens), len(ids))
            table.append((NULL_BLOCK,) * first + tuple(ids[first:count]))
        return tuple(table)
