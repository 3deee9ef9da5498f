"""The layouts of a fleet's caches: one model in the layouts of both roles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

from kvxfer.instances import Role
from kvxfer.layout import KvLayout

_MODEL: Final = KvLayout(num_layers=2, num_kv_heads=2, head_size=4, dtype="uint8", block_size=2)
_MODELS: Final = {
    "plain": _MODEL,
    "MLA": replace(_MODEL, num_kv_heads=1, mla=True),
    "layer groups": replace(_MODEL, layer_groups=(0, 1)),
}
_RANKS: Final = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (2, 2))


def choose(rng: random.Random) -> tuple[str, dict[Role, KvLayout]]:
    """Returns the model's name and the layouts of both roles."""
    name = rng.choice(["plain", "plain", "plain", "MLA", "layer groups"])
    layouts = {}
    for role in (Role.PREFILL, Role.DECODE):
        tp_size, pp_size = rng.choice(_RANKS)
        layouts[role] = replace(
            _MODELS[name],
            # Groups keep a part of their blocks, so block sizes must be equal on both sides.
            block_size=2 if name == "layer groups" else rng.choice([2, 2, 4]),
            order=rng.choice(["NHD", "HND"]),
            kv=rng.choice(["separate", "interleaved"]),
            tp_size=tp_size,
            pp_size=pp_size,
        )
    return name, layouts


def num_blocks(rng: random.Random, model: str) -> int:
    """Returns the number of blocks of each pool: a few requests fill it."""
    return 12 if model == "layer groups" else rng.choice([4, 6, 12])
