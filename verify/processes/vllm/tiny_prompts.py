"""Prompts of 1 to 3,500 tokens for the tiny model. Many share a prefix with another prompt."""

from __future__ import annotations

import random

_EDGES = (1, 2, 127, 128, 129, 255, 256, 257, 2047, 2048, 2049, 3500)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    made: list[list[int]] = []
    for index in range(count):
        short = rng.random() < 0.6
        length = rng.randint(1, 600) if short else rng.randint(600, 3500)
        if index < len(_EDGES) and count > len(_EDGES):
            length = _EDGES[index]
        begin = rng.choice(made)[: rng.randrange(length)] if made and rng.random() < 0.4 else []
        made.append(begin + [rng.randrange(3, 512) for _ in range(length - len(begin))])
    return made
