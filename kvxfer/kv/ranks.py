"""The ranks of a prefill instance that write to each rank of a decode instance, and their parts.

Pure functions of two layouts, so that every rank of both sides gets the same result. Exactly one
prefill rank writes each byte of a decode rank. Each prefill rank writes to some rank, or is at
least told that it has nothing to write.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Final

from kvxfer.errors import LayoutMismatch
from kvxfer.layout import KvLayout

_SAME_ON_BOTH_SIDES: Final = ("num_layers", "layer_groups", "layer_shapes")
_SAME_OF_EACH_SHAPE: Final = ("num_kv_heads", "head_size", "dtype", "mla")
_MAX_BLOCKS_IN_CYCLE: Final = 1024


def require_mappable(prefill: KvLayout, decode: KvLayout) -> None:
    """Raises LayoutMismatch with the first field that no plan can bridge: a property of the model,
    or a form that only engines of one kind understand. Block sizes are such a field if a cycle
    takes more than 1,024 blocks of the two sides together."""
    _require_same(_SAME_ON_BOTH_SIDES, prefill, decode)
    for shape in range(len(prefill.shapes) + 1):
        _require_same_shape(prefill.of_shape(shape), decode.of_shape(shape))
    if prefill.layer_groups:
        # All tokens of a present block are sent, whatever is absent before it.
        for shape in range(len(prefill.shapes) + 1):
            _require_same(("block_size",), prefill.of_shape(shape), decode.of_shape(shape))
    cycle = math.lcm(prefill.block_size, decode.block_size)
    if cycle // prefill.block_size + cycle // decode.block_size > _MAX_BLOCKS_IN_CYCLE:
        raise LayoutMismatch("block_size", prefill.block_size, decode.block_size)


def _require_same(fields: Iterable[str], prefill: KvLayout, decode: KvLayout) -> None:
    for field in fields:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            raise LayoutMismatch(field, ours, theirs)


def _require_same_shape(prefill: KvLayout, decode: KvLayout) -> None:
    _require_same(_SAME_OF_EACH_SHAPE, prefill, decode)
    if prefill.state or decode.state:
        _require_same(("kv", "packing", "sections", "block_size"), prefill, decode)
    elif prefill.opaque or decode.opaque:
        _require_same(("kv", "packing"), prefill, decode)
        if prefill.packings is None:
            _require_same(("block_size",), prefill, decode)
    elif prefill.joined or decode.joined:
        _require_same(("kv", "packing"), prefill, decode)


def heads_between(prefill: KvLayout, decode: KvLayout) -> range:
    """Returns the KV heads that are on both ranks, by their index in the whole model."""
    return range(
        max(prefill.first_head, decode.first_head),
        min(
            prefill.first_head + prefill.heads_per_rank,
            decode.first_head + decode.heads_per_rank,
        ),
    )


def layers_between(prefill: KvLayout, decode: KvLayout) -> tuple[int, ...]:
    """Returns the layers that a prefill rank writes to a decode rank, by index in the model."""
    turns = _turns(prefill, decode)
    shapes = prefill.layer_shapes or (0,) * prefill.num_layers
    before = [0] * len(turns)  # layers of each shape
    layers = []
    both = _layers_on_both(prefill, decode)
    for layer, shape in enumerate(shapes[: both.stop]):
        turn = turns[shape]
        if layer in both and turn is not None and before[shape] % turn[1] == turn[0]:
            layers.append(layer)
        before[shape] += 1
    return tuple(layers)


@lru_cache(maxsize=1024)
def sources(prefill: KvLayout, decode: KvLayout) -> tuple[int, ...]:
    """Returns the ranks of the prefill instance to which a decode rank offers its blocks.

    The rank of `prefill` does not matter. Raises LayoutMismatch.
    """
    require_mappable(prefill, decode)
    heads = [
        rank
        for rank in range(prefill.tp_size)
        if any(_turns(replace(prefill, tp_rank=rank), decode))
    ]
    return tuple(
        stage * prefill.tp_size + rank
        for stage in range(prefill.pp_size)
        if _layers_on_both(replace(prefill, pp_rank=stage), decode)
        for rank in heads
    )


@lru_cache(maxsize=1024)
def targets(prefill: KvLayout, decode: KvLayout) -> tuple[int, ...]:
    """Returns the ranks of the decode instance that offer their blocks to a prefill rank.

    The rank of `decode` does not matter. Raises LayoutMismatch.
    """
    require_mappable(prefill, decode)
    heads = [
        rank
        for rank in range(decode.tp_size)
        if any(_turns(prefill, replace(decode, tp_rank=rank)))
    ]
    return tuple(
        stage * decode.tp_size + rank
        for stage in range(decode.pp_size)
        if _layers_on_both(prefill, replace(decode, pp_rank=stage))
        for rank in heads
    )


def bytes_per_token(prefill: KvLayout, decode: KvLayout) -> int:
    """Returns the bytes that a prefill rank writes to a decode rank for each token. States do not
    count, as they are not per token."""
    ours, theirs = prefill.of_layers, decode.of_layers
    total = 0
    for layer in layers_between(prefill, decode):
        src, dst = ours[layer - prefill.first_layer], theirs[layer - decode.first_layer]
        if not dst.state:
            total += dst.vectors * len(heads_between(src, dst)) * dst.vector_bytes
    return total


def _layers_on_both(prefill: KvLayout, decode: KvLayout) -> range:
    return range(
        max(prefill.first_layer, decode.first_layer),
        min(
            prefill.first_layer + prefill.layers_per_rank,
            decode.first_layer + decode.layers_per_rank,
        ),
    )


def _turns(prefill: KvLayout, decode: KvLayout) -> tuple[tuple[int, int] | None, ...]:
    """Returns the _turn() of the layers of each shape."""
    shapes = range(len(prefill.shapes) + 1)
    return tuple(_turn(prefill.of_shape(shape), decode.of_shape(shape)) for shape in shapes)


def _turn(prefill: KvLayout, decode: KvLayout) -> tuple[int, int] | None:
    """Returns (i, n) if the prefill rank writes every n-th layer of a shape from the i-th on; None
    if it writes none, as the ranks have no head in common or another replica of the heads writes.

    With m replicas of a head at prefill and n at decode, replica j serves replica j * n // m if
    m > n, and those that serve the same one take turns by layer. Otherwise each serves several.
    """
    if not heads_between(prefill, decode):
        return None
    ours, theirs = prefill.head_replicas, decode.head_replicas
    replica, served = prefill.tp_rank % ours, decode.tp_rank % theirs
    if ours <= theirs:
        return (0, 1) if served * ours // theirs == replica else None
    if replica * theirs // ours != served:
        return None
    first, end = -(-served * ours // theirs), -(-(served + 1) * ours // theirs)
    return replica - first, end - first
