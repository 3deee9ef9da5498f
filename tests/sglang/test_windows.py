"""A model whose layers with a sliding window have a separate pool, SGLang's SWAKVPool."""

from __future__ import annotations

import random

import pytest

from .asking import assert_same, prompts
from .conftest import Pair

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]


def test_tokens_are_those_of_an_aggregated_server(window_pair: Pair, rng: random.Random) -> None:
    """Prompts end before, in and after the first window, in one chunk or in several. Some begin
    like earlier ones, which prefill has in its cache."""
    pair = window_pair
    assert "SWAKVPool mem usage" in pair.servers["decode"].output
    asked = prompts(rng, 20)
    asked += [prompt + [rng.randrange(2, 500) for _ in range(40)] for prompt in asked[5:10]]
    assert_same(pair, asked)
