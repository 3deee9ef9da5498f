"""Which blocks of a prompt travel: those that decode needs to compute the prompt's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

NULL_BLOCK: Final = 0
"""vLLM's block in the place of those outside of a sliding window."""

_Block = TypeVar("_Block")

BlockTable: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids of each KV cache group."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """What a KV cache group keeps of a prompt."""

    window: int | None = None
    """Tokens of a sliding window, or None for all tokens."""
    state: bool = False
    """A block is the state after its last token, so the last one has everything."""
    single: bool = False
    """Of a state: a request has one block, whatever its length."""

    @property
    def partial(self) -> bool:
        """Whether blocks of a prompt are given back, or overwritten, that decode may need."""
        return self.state or self.window is not None


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Of `block_size` tokens, in KV cache groups."""

    block_size: int
    groups: tuple[BlockGroup, ...] = (BlockGroup(),)
    last_tokens: int = 1
    """Of a prompt, those that decode computes itself: the last one, with a draft model of several
    modules as many as these read ahead."""

    @property
    def exact(self) -> bool:
        """Whether prefill may not compute the last tokens: decode needs the state before them."""
        return any(group.state for group in self.groups)

    def moved(self, prompt_tokens: int) -> int:
        """Tokens that come from prefill; none of a prompt that has no others."""
        return max(prompt_tokens - self.last_tokens, 0)

    def count(self, prompt_tokens: int) -> int:
        """Blocks until the last tokens."""
        return -(-max(self.moved(prompt_tokens), 1) // self.block_size)

    def first(self, group: int, prompt_tokens: int) -> int:
        """The first block that the last tokens attend to."""
        if self.groups[group].state:
            return self.count(prompt_tokens) - 1
        window = self.groups[group].window
        if window is None:
            return 0
        return max(prompt_tokens - self.last_tokens + 1 - window, 0) // self.block_size

    def in_place(
        self, group: int, blocks: Sequence[_Block], prompt_tokens: int
    ) -> dict[int, _Block]:
        """Those that travel of the blocks of a group, by their place in the prompt."""
        first, end = self.first(group, prompt_tokens), self.count(prompt_tokens)
        if self.groups[group].single:
            return dict(zip([first], blocks, strict=False))
        return dict(enumerate(blocks[first:end], first))

    def table(self, block_ids: Sequence[Sequence[int]], prompt_tokens: int) -> BlockTable:
        """Those that travel of the blocks of a prompt, as far as they are allocated. The others
        may have been given back, and hold something else."""
        rows = [self.in_place(group, ids, prompt_tokens) for group, ids in enumerate(block_ids)]
        known = max((max(row) + 1 for row in rows if row), default=0)
        return tuple(tuple(row.get(at, NULL_BLOCK) for at in range(known)) for row in rows)
