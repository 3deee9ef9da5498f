"""Asks a pair and an aggregated server the same prompts, and compares their tokens."""

from __future__ import annotations

import concurrent.futures
import random

import httpx2

from .conftest import Pair


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    lengths = [1, 15, 16, 17, 100, 511, 512, 513, 1500, 3000]
    return [[rng.randrange(2, 500) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def tokens(answer: httpx2.Response) -> list[int]:
    assert answer.is_success, answer.text
    return list(answer.json()["output_ids"])


def assert_same(pair: Pair, asked: list[list[int]]) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        apart = [tokens(decode) for _, decode in threads.map(pair.ask, asked)]
        whole = list(threads.map(tokens, map(pair.aggregated.generate, asked)))
    different = [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b]
    assert not different
