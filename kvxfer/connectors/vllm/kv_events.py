"""The content of vLLM's prefix cache, from its KV events (`--kv-events-config`), with evictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.prefix_hashes import TOKENS_PER_HASH, following, hash_of, seed

# The other groups of hybrid models keep only the end of a prompt.
_WHOLE: Final = frozenset({None, "full_attention", "mla_attention"})
_DEVICE: Final = frozenset({None, "GPU"})  # vLLM calls the pool of any device "GPU"


@dataclass(slots=True)
class CacheChanges:
    """Hashes (kvxfer.prefix_hashes) that came and went, in this order: cleared, removed, added."""

    cleared: bool = False
    removed: dict[int, None] = field(default_factory=dict)
    added: dict[int, None] = field(default_factory=dict)

    def add(self, number: int) -> None:
        self.removed.pop(number, None)
        self.added[number] = None

    def remove(self, number: int) -> None:
        self.added.pop(number, None)
        self.removed[number] = None

    def clear(self) -> None:
        self.cleared = True
        self.removed.clear()
        self.added.clear()

    def follow(self, later: CacheChanges) -> None:
        """Adds later changes to these."""
        if later.cleared:
            self.clear()
        for number in later.removed:
            self.remove(number)
        for number in later.added:
            self.add(number)


@dataclass(slots=True)
class _Block:
    """A cached block, and what it adds to the chain of the blocks before it."""

    parent: bytes
    """The chain after its last whole hash."""
    rest: tuple[int, ...]
    """Tokens after that."""
    hashes: tuple[int, ...]


class EventPrefixes:
    """The cached prefixes of one engine, from its events. One thread: the engine's own loop.

    A hash covers TOKENS_PER_HASH tokens, and a block of vLLM more or fewer: a hash is cached while
    the block that holds its last token is.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._blocks: dict[tuple[int | None, Any], _Block] = {}  # keys: group, and vLLM's hash

    def take(self, events: Iterable[Any]) -> CacheChanges:
        changes = CacheChanges()
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    if event.medium in _DEVICE and event.kv_cache_spec_kind in _WHOLE:
                        self._stored(event, changes)
                case "BlockRemoved":
                    if event.medium in _DEVICE:
                        self._removed(event, changes)
                case "AllBlocksCleared":
                    self._blocks.clear()
                    changes.clear()
        return changes

    def _stored(self, event: Any, changes: CacheChanges) -> None:
        parent = event.parent_block_hash
        if parent is None:
            before = _Block(seed(event.lora_name or self._model), (), ())
        elif (known := self._blocks.get((event.group_idx, parent))) is not None:
            before = known
        else:
            return  # more than tokens identifies the block before
        of_tokens = {None, (), (event.lora_name,)}
        for index, block_hash in enumerate(event.block_hashes):
            extra = event.extra_keys[index] if event.extra_keys else None
            if (extra if extra is None else tuple(extra)) not in of_tokens:
                return
            begin = index * event.block_size
            before = _after(before, event.token_ids[begin : begin + event.block_size])
            self._blocks[event.group_idx, block_hash] = before
            for number in before.hashes:
                changes.add(number)

    def _removed(self, event: Any, changes: CacheChanges) -> None:
        """Removes the hashes of blocks. A copy that vLLM may have in another block counts again
        only once it is used."""
        for block_hash in event.block_hashes:
            block = self._blocks.pop((event.group_idx, block_hash), None)
            for number in () if block is None else block.hashes:
                changes.remove(number)


def _after(before: _Block, tokens: Sequence[int]) -> _Block:
    parent, rest = before.parent, (*before.rest, *tokens)
    hashes = []
    while len(rest) >= TOKENS_PER_HASH:
        parent = following(parent, rest[:TOKENS_PER_HASH])
        rest = rest[TOKENS_PER_HASH:]
        hashes.append(hash_of(parent))
    return _Block(parent, rest, tuple(hashes))
