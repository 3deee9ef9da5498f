"""The blocks of a prompt that are moved: decode needs them to compute the prompt's last tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

NULL_BLOCK: Final = 0
"""The block id that vLLM puts in place of blocks outside a sliding window."""

_Block = TypeVar("_Block")

BlockTable: TypeAlias = tuple[tuple[int, ...], ...]
"""Block ids of each KV cache group."""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """The part of a prompt that a KV cache group keeps."""

    window: int | None = None
    """Tokens of a sliding window, or None for all tokens."""
    state: bool = False
    """A block is the state after its last token, so the last one has everything."""
    single: bool = False
    """Whether the state of a request is one block, whatever its length."""
    entries: int = 1
    """Block table entries for the tokens of a block. The last of them has the block's id."""

    @property
    def partial(self) -> bool:
        """True if vLLM frees or overwrites blocks of a prompt that decode may need."""
        return self.state or self.window is not None


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The blocks of prompts in KV cache groups, with a table entry for each `block_size` tokens."""

    block_size: int
    groups: tuple[BlockGroup, ...] = (BlockGroup(),)
    last_tokens: int = 1
    """The last tokens of a prompt, which decode computes itself: one, or with a draft model of
    several modules as many as these read ahead."""

    @property
    def exact(self) -> bool:
        """True if prefill must not compute the last tokens: decode needs the state before them."""
        return any(group.state for group in self.groups)

    def moved(self, prompt_tokens: int) -> int:
        """Returns the number of tokens that come from prefill: all but the last ones."""
        return max(prompt_tokens - self.last_tokens, 0)

    def count(self, prompt_tokens: int) -> int:
        """Returns the number of entries in the block tables."""
        ends = (self._end(group, prompt_tokens) * group.entries for group in self.groups)
        return max(ends)

    def _end(self, group: BlockGroup, prompt_tokens: int) -> int:
        """Returns the number of blocks up to the last tokens."""
        return -(-max(self.moved(prompt_tokens), 1) // (group.entries * self.block_size))

    def first(self, group: BlockGroup, prompt_tokens: int) -> int:
        """Returns the index of the first block that the last tokens attend to."""
        if group.state:
            return self._end(group, prompt_tokens) - 1
        if group.window is None:
            return 0
        attended = max(prompt_tokens - self.last_tokens + 1 - group.window, 0)
        return attended // (group.entries * self.block_size)

    def in_place(
        self, group: BlockGroup, blocks: Sequence[_Block], prompt_tokens: int
    ) -> dict[int, _Block]:
        """Returns the moved blocks of a group, by their entry in its block table."""
        if group.single:
            return dict(zip([self.count(prompt_tokens) - 1], blocks, strict=False))
        first, end = self.first(group, prompt_tokens), self._end(group, prompt_tokens)
        return {
            (at + 1) * group.entries - 1: block for at, block in enumerate(blocks[first:end], first)
        }

    def table(self, block_ids: Sequence[Sequence[int]], prompt_tokens: int) -> BlockTable:
        """Returns the table of a prompt's moved blocks, as far as they are allocated. The other
        blocks may have been freed, and hold something else.

        Raises nothing, as that would end vLLM's engine: sessions refuse a table for other groups.
        """
        rows = [
            self.in_place(group, ids, prompt_tokens)
            for group, ids in zip(self.groups, block_ids, strict=False)
        ]
        known = max((max(row) + 1 for row in rows if row), default=0)
        return tuple(tuple(row.get(at, NULL_BLOCK) for at in range(known)) for row in rows)
