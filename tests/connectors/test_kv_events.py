"""The changes of vLLM's prefix cache, from its KV events to kvxfer's hashes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from kvxfer.connectors.vllm.kv_events import CacheChanges, EventPrefixes
from kvxfer.prefix_hashes import prompt_hashes


@dataclass
class BlockStored:
    """The members of vLLM's event that are read."""

    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = 0
    kv_cache_spec_kind: str | None = "full_attention"


@dataclass
class BlockRemoved:
    block_hashes: list[Any]
    medium: str | None = "GPU"
    group_idx: int | None = 0


class AllBlocksCleared:
    pass


def stored(prompt: list[int], size: int, blocks: range | None = None, **more: Any) -> BlockStored:
    """Returns an event for some of a prompt's whole blocks; its block 0 is named (0, size)."""
    blocks = range(len(prompt) // size) if blocks is None else blocks
    names = [(number, tuple(prompt[: (number + 1) * size])) for number in blocks]
    first = blocks.start
    parent = None if not first else (first - 1, tuple(prompt[: first * size]))
    tokens = prompt[first * size : blocks.stop * size]
    return BlockStored(names, parent, tokens, size, **more)


def removed(prompt: list[int], size: int, number: int, **more: Any) -> BlockRemoved:
    return BlockRemoved([(number, tuple(prompt[: (number + 1) * size]))], **more)


@pytest.mark.parametrize("size", [16, 48, 64, 128, 192])
def test_a_prompt_has_its_hashes_for_any_size_of_blocks_and_in_any_pieces(
    size: int, rng: random.Random
) -> None:
    prompt = [rng.randrange(1000) for _ in range(1000)]
    prefixes = EventPrefixes("llama")
    added: list[int] = []
    whole = 1000 // size
    at = 0
    while at < whole:
        upto = rng.randint(at + 1, whole)
        added += prefixes.take([stored(prompt, size, range(at, upto))]).added
        at = upto
    assert tuple(added) == prompt_hashes(prompt[: whole * size], "llama")


def test_an_evicted_hash_comes_back_when_its_block_is_stored_again() -> None:
    prompt = list(range(256))
    one, two, three, four = prompt_hashes(prompt, "llama")
    prefixes = EventPrefixes("llama")
    prefixes.take([stored(prompt, 32)])
    # One block holds the last token of the third hash, the other the last token of none.
    gone = prefixes.take([removed(prompt, 32, 5), removed(prompt, 32, 6)])
    assert gone == CacheChanges(removed={three: None})
    assert prefixes.take([removed(prompt, 32, 5)]) == CacheChanges()
    back = prefixes.take([stored(prompt, 32, range(5, 8))])
    assert back == CacheChanges(added={three: None, four: None})
    both = prefixes.take([removed(prompt, 32, 1), stored(prompt, 32, range(2))])
    assert both == CacheChanges(added={one: None})
    assert prefixes.take([AllBlocksCleared()]) == CacheChanges(cleared=True)
    assert prefixes.take([stored(prompt, 32, range(1, 2))]) == CacheChanges()
    again = prefixes.take([stored(prompt, 32, range(4))])
    assert again == CacheChanges(added={one: None, two: None})


def test_an_adapter_has_hashes_under_its_name() -> None:
    prompt = list(range(64))
    event = stored(prompt, 64, lora_name="poet", extra_keys=[("poet",)])
    assert tuple(EventPrefixes("llama").take([event]).added) == prompt_hashes(prompt, "poet")


@pytest.mark.parametrize(
    "more",
    [
        {"extra_keys": [("image", 3)]},
        {"extra_keys": [("a cache salt",)]},
        {"medium": "CPU"},
        {"kv_cache_spec_kind": "sliding_window"},
    ],
)
def test_blocks_that_depend_on_more_than_tokens_or_are_elsewhere_are_not_reported(
    more: dict[str, Any],
) -> None:
    prompt = list(range(128))
    prefixes = EventPrefixes("llama")
    assert prefixes.take([stored(prompt, 64, range(1), **more)]) == CacheChanges()
    assert prefixes.take([stored(prompt, 64, range(1, 2))]) == CacheChanges(), "its parent is not"


def test_the_removal_of_a_block_of_another_group_or_medium_changes_nothing() -> None:
    prompt = list(range(64))
    prefixes = EventPrefixes("llama")
    prefixes.take([stored(prompt, 64)])
    elsewhere = [removed(prompt, 64, 0, group_idx=1), removed(prompt, 64, 0, medium="CPU")]
    assert prefixes.take(elsewhere) == CacheChanges()


def test_changes_follow_one_another() -> None:
    changes = CacheChanges()
    for later, expected in [
        (CacheChanges(added={1: None, 2: None}), CacheChanges(added={1: None, 2: None})),
        (CacheChanges(removed={1: None}), CacheChanges(removed={1: None}, added={2: None})),
        (CacheChanges(cleared=True, added={3: None}), CacheChanges(True, {}, {3: None})),
    ]:
        changes.follow(later)
        assert changes == expected
