"""The hashes of a prompt that workers publish, and those that routers ask for."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kvxfer.prefix_hashes import (
    MAX_HASHES_PER_REQUEST,
    TOKENS_PER_HASH,
    as_text,
    asked_hashes,
    prompt_hashes,
)

DOCS = Path(__file__).parents[1] / "docs/pairing.md"


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 3500, 16384, 16385, 100_000])
def test_hashes_that_are_asked_for_are_published_and_reach_to_the_end(
    tokens: int, rng: random.Random
) -> None:
    prompt = [rng.randrange(32000) for _ in range(tokens)]
    published = prompt_hashes(prompt, "llama")
    asked, tokens_per_hash = asked_hashes(prompt, "llama")
    assert len(published) == tokens // TOKENS_PER_HASH
    assert len(asked) <= MAX_HASHES_PER_REQUEST
    assert set(asked) <= set(published)
    assert tokens_per_hash is not None
    assert tokens - tokens_per_hash < len(asked) * tokens_per_hash <= tokens
    for number, each in enumerate(asked, 1):
        assert each == published[number * tokens_per_hash // TOKENS_PER_HASH - 1]


def test_the_hashes_are_those_of_the_docs() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|$", DOCS.read_text(), re.MULTILINE)
    prompts = {
        "0 to 63": range(64),
        "0 to 130": range(131),
        "0 to 62": range(63),
        "64 times 0": [0] * 64,
        f"64 times {2**63 - 1}": [2**63 - 1] * 64,
    }
    told = [(model, ids, re.findall("[0-9a-f]{16}", row)) for model, ids, row in rows]
    told = [(model, ids, hashes) for model, ids, hashes in told if ids in prompts]
    assert {ids for _, ids, _ in told} == prompts.keys()
    for model, ids, hashes in told:
        assert as_text(prompt_hashes(list(prompts[ids]), model)) == hashes


def test_prompts_share_the_hashes_of_their_common_beginning_and_models_none() -> None:
    one, other = list(range(200)), [*range(128), *range(500, 572)]
    both = zip(prompt_hashes(one, "m"), prompt_hashes(other, "m"), strict=True)
    common = [a == b for a, b in both]
    assert common == [True, True, False]
    assert not set(prompt_hashes(one, "m")) & set(prompt_hashes(one, "adapter"))
