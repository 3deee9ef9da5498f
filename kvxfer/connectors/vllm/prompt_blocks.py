"""Which blocks of a prompt travel: those that decode needs to compute the prompt's last token."""

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

    def count(self, prompt_tokens: int) -> int:
        """Blocks until the last token, which decode computes itself."""
        return -(-max(prompt_tokens - 1, 1) // self.block_size)

    def first(self, group: int, prompt_tokens: int) -> int:
        """The first block that the last token attends to."""
        window = self.windows[group]
        return 0 if window is None else max(prompt_tokens - window, 0) // self.block_size

    def table(self, block_ids: Sequence[Sequence[int]], prompt_tokens: int) -> BlockTable:
        """Those that travel of the blocks of a prompt, as far as they are allocated. The others
        may have been given back, and hold something else."""
        count, table = self.count(prompt_tokens), []
        for group, ids in enumerate(block_ids):
            first = min(self.first(group, prompt_tokens), len(ids))
            table.append((NULL_BLOCK,) * first + tuple(ids[first:count]))
        return tuple(table)
