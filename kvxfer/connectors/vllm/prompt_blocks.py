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
    entries: int = 1
    """Entries of a block table for the tokens of a block. It stands in the last of them."""

    @property
    def partial(self) -> bool:
        """Whether blocks of a prompt are given back, or overwritten, that decode may need."""
        return self.state or self.window is not None


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """In KV cache groups, whose tables have an entry for each `block_size` tokens."""

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
        """Entries of the block tables."""
        ends = (self._end(group, prompt_tokens) * group.entries for group in self.groups)
        return max(ends)

    def _end(self, group: BlockGroup, prompt_tokens: int) -> int:
        """Blocks until the last tokens."""
        return -(-max(self.moved(prompt_tokens), 1) // (group.entries * self.block_size))

    def first(self, group: BlockGroup, prompt_tokens: int) -> int:
        """The first block that the last tokens attend to."""
        if group.state:
            return self._end(group, prompt_tokens) - 1
        if group.window is None:
            return 0
        attended = max(prompt_tokens - self.last_tokens + 1 - group.window, 0)
        return attended // (group.entries * self.block_size)

    def in_place(
        self, group: BlockGroup, blocks: Sequence[_Block], prompt_tokens: int
    ) -> dict[int, _Block]:
        """Those that travel of the blocks of a group, by their entry in its block table."""
        if group.single:
            return dict(zip([self.count(prompt_tokens) - 1], blocks, strict=False))
        first, end = self.first(group, prompt_tokens), self._end(group, prompt_tokens)
        return {
            (at + 1) * group.entries - 1: block for at, block in enumerate(blocks[first:end], first)
        }

    def table(self, block_ids: Sequence[Sequence[int]], prompt_tokens: int) -> BlockTable:
        """Those that travel of the blocks of a prompt, as far as they are allocated. The others
        may have been given back, and hold something else.

        Raises nothing, as that would end vLLM's engine: sessions refuse a table for other groups.
        """
        rows = [
            self.in_place(group, ids, prompt_tokens)
            for group, ids in zip(self.groups, block_ids, strict=False)
        ]
        known = max((max(row) + 1 for row in rows if row), default=0)
        return tuple(tuple(row.get(at, NULL_BLOCK) for at in range(known)) for row in rows)
