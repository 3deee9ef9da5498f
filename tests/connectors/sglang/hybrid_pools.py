"""Pools as SGLang 0.5.23 makes them for models that keep state, and the state that it hands over
with a prompt of five pages. Sizes are small; shapes are those of the classes named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.connectors.sglang.instances import LAYERS, PAGE_BYTES, PAGE_SIZE, State

PAGES_OF_PROMPT = ([3, 9, 1, 4, 7], [8, 2, 5, 0, 11])
"""The prompt's pages, at prefill and at decode."""


@dataclass(frozen=True)
class Hybrid:
    states: tuple[State, ...]
    source: Sequence[Any]
    target: Sequence[Any]
    kv_page_bytes: tuple[int, ...] = (PAGE_BYTES,) * 2 * LAYERS
    mla: bool = False


def row(index: int) -> list[Any]:
    """Returns a request's row as HybridReqToTokenPool gives it: of the mapping's dtype, in a list,
    without a dimension."""
    return [np.array(index, dtype=np.int32)]


PLAIN = Hybrid((), [], [])
# SWAKVPool: K of both layers with a window, then V, and page numbers of a separate allocator.
SLIDING = Hybrid(
    (State("swa", 6, (256,) * 4),),
    [np.array([3, 1], np.int32)],
    [np.array([4, 3], np.int32)],
)
# HybridLinearKVPool: MambaPool has conv of each layer, then temporal of each layer.
MAMBA = Hybrid((State("mamba", 5, (96, 96, 96, 640, 640, 640)),), [row(2)], [row(4)])
# DSATokenToKVPool: a latent vector, and an index key with its scale for each token. The second
# layer takes the top-k of the first and has no index: no rows, items of no bytes.
SPARSE = Hybrid(
    (State("dsa", 12, (132 * PAGE_SIZE, 0, 132 * PAGE_SIZE)),),
    [np.array(PAGES_OF_PROMPT[0], np.int32)],
    [np.array(PAGES_OF_PROMPT[1], np.int32)],
    (656 * PAGE_SIZE,) * LAYERS,
    mla=True,
)
# SWAKVPool of two MHATokenToKVPoolMXFP8: the scales of K and V are in pages like K and V.
SCALED = Hybrid(
    (
        State("swa", 6, (256,) * 4),
        State("block_scale", 12, (32,) * 2 * LAYERS),
        State("block_scale_swa", 6, (16,) * 4),
    ),
    [np.array([3, 1], np.int32), np.array(PAGES_OF_PROMPT[0]), np.array([3, 1], np.int32)],
    [np.array([4, 3], np.int32), np.array(PAGES_OF_PROMPT[1]), np.array([4, 3], np.int32)],
)
# HybridLinearKVPool over DSATokenToKVPool.
MAMBA_SPARSE = Hybrid(
    (State("mamba", 5, (96, 640)), State("dsa", 12, (132 * PAGE_SIZE,) * 2)),
    [row(2), np.array(PAGES_OF_PROMPT[0])],
    [row(1), np.array(PAGES_OF_PROMPT[1])],
    (656 * PAGE_SIZE,) * 2,
    mla=True,
)
# MHATokenToKVPool with a v_head_dim, and one with the pool of a draft model appended.
OTHER_V = Hybrid((), [], [], (768,) * LAYERS + (512,) * LAYERS)
DRAFT = Hybrid((), [], [], (512,) * 4 + (256, 256))
# HybridLinearKVPool of a model without attention: no KV buffers at all.
RECURRENT = Hybrid((State("mamba", 5, (96, 640)),), [row(2)], [row(3)], ())

HYBRIDS = {
    "plain": PLAIN,
    "sliding": SLIDING,
    "mamba": MAMBA,
    "sparse": SPARSE,
    "scaled": SCALED,
    "mamba-sparse": MAMBA_SPARSE,
    "other-v": OTHER_V,
    "draft": DRAFT,
    "recurrent": RECURRENT,
}


def expected(hybrid: Hybrid) -> list[dict[int, int]]:
    """Maps items of decode to items of prefill, for each buffer; other items do not change."""
    pages = dict(zip(*reversed(PAGES_OF_PROMPT), strict=True))
    found = [pages] * len(hybrid.kv_page_bytes)
    for state, source, target in zip(hybrid.states, hybrid.source, hybrid.target, strict=True):
        items = dict(zip(np.ravel(target).tolist(), np.ravel(source).tolist(), strict=True))
        found += [items] * len(state.item_bytes)
    return found
