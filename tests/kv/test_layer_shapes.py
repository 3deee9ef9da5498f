"""Transfers between caches whose layers differ in shape, such as those of sparse MLA with its
indexer, and of a draft model."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from kvxfer.errors import InvalidArgument, LayoutMismatch
from kvxfer.kv.connection import check_hello
from kvxfer.kv.messages import Hello
from kvxfer.kv.plan import plan_transfer
from kvxfer.kv.ranks import bytes_per_token, layers_between, sources
from kvxfer.kv_versions import NEWEST
from kvxfer.layout import KvLayout, LayerShape

from .workers import make_ticket, receive, send, worker

INDEXER = LayerShape(num_kv_heads=1, head_size=12, dtype="uint8", mla=True)
DRAFT = LayerShape(num_kv_heads=2, head_size=8, dtype="bfloat16")
LARGE = dataclasses.replace(INDEXER, block_size=8)
STATE = LayerShape(1, 6, "uint8", "HND", "state", sections=(6,), block_size=8)
LAYOUT = KvLayout(
    num_layers=5,
    num_kv_heads=1,
    head_size=24,
    dtype="float32",
    block_size=4,
    mla=True,
    shapes=(INDEXER, DRAFT),
    layer_shapes=(0, 1, 0, 1, 2),
)


def changed(shape: int, **changes: Any) -> KvLayout:
    shapes = list(LAYOUT.shapes)
    shapes[shape - 1] = dataclasses.replace(shapes[shape - 1], **changes)
    return dataclasses.replace(LAYOUT, shapes=tuple(shapes))


@pytest.mark.native
@pytest.mark.parametrize("checksums", [False, True])
async def test_every_layer_arrives(fabric: str, rng: random.Random, checksums: bool) -> None:
    async with (
        worker("prefill", fabric, layout=LAYOUT, checksums=checksums) as prefill,
        worker("decode", fabric, layout=LAYOUT) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        sent, received = await asyncio.gather(
            send(prefill, ticket, 5, rng), receive(prefill, decode, ticket, 5)
        )
    assert received == sent
    assert sum(map(len, received)) == 5 * LAYOUT.stack_bytes


def test_sizes_are_those_of_each_layer() -> None:
    sizes = [LAYOUT.of_layer(layer).block_bytes for layer in range(5)]
    assert sizes == [4 * 96, 4 * 12, 4 * 96, 4 * 12, 4 * 2 * 2 * 16]
    assert [LAYOUT.of_layer(layer).parts for layer in (3, 4)] == [("KV",), ("K", "V")]
    assert bytes_per_token(LAYOUT, LAYOUT) * 4 == LAYOUT.stack_bytes == sum(sizes)


def test_ranks_share_the_layers_of_each_shape() -> None:
    """Latent vectors are whole on every rank, and ranks take turns; heads are split."""
    prefill, decode = dataclasses.replace(LAYOUT, tp_size=2), LAYOUT
    assert sources(prefill, decode) == (0, 1)
    assert [layers_between(prefill.of_rank(rank), decode) for rank in (0, 1)] == [
        (0, 1, 4),
        (2, 3, 4),
    ]
    plan = plan_transfer(prefill.of_rank(1), decode)
    assert plan.first_grants == (0, 1, 2, 4)


def test_heads_are_put_in_order_on_the_way() -> None:
    hnd = changed(2, order="HND")
    plan = plan_transfer(LAYOUT, hnd)
    assert not plan.permutes
    assert {copy.length for copy in plan.layers[-1].copies} == {16}


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (changed(1, head_size=16), "head_size is 12 at prefill and 16 at decode"),
        (changed(1, dtype="int8"), "dtype is 'uint8' at prefill and 'int8' at decode"),
        (changed(2, num_kv_heads=4), "num_kv_heads is 2 at prefill and 4 at decode"),
        (changed(2, kv="joined"), "kv is 'separate' at prefill"),
        (dataclasses.replace(LAYOUT, layer_shapes=(0, 1, 1, 0, 2)), "layer_shapes is"),
        (dataclasses.replace(LAYOUT, shapes=(), layer_shapes=()), "layer_shapes is"),
    ],
)
def test_the_error_names_the_field_in_which_shapes_differ(other: KvLayout, field: str) -> None:
    with pytest.raises(LayoutMismatch, match=field):
        plan_transfer(LAYOUT, other)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"layer_shapes": (0, 1, 0, 1)}, r"layer_shapes is \(0, 1, 0, 1\) for 5 layers"),
        ({"layer_shapes": (0, 1, 0, 1, 3)}, "and 2 shapes beside"),
        ({"layer_shapes": (0, 1, 0, 1, 1)}, "each of them used"),
        ({"layer_shapes": (0, 1, 0, 1, "2")}, "pass the shape of each layer"),
        ({"layer_shapes": ()}, "pass the shape of each layer"),
        ({"shapes": ()}, "and 0 shapes beside"),
        ({"shapes": (INDEXER, dataclasses.replace(DRAFT, dtype="int4"))}, "dtype is 'int4'"),
        ({"tp_size": 3}, "tp_size is 3 for 2 KV heads"),
        ({"shapes": (LARGE, DRAFT)}, r"blocks of \[4, 8\] tokens with layer_groups \(\)"),
        ({"shapes": (LARGE, DRAFT), "layer_groups": (0, 1, 0, 0, 2)}, "into different groups"),
        ({"shapes": (dataclasses.replace(LARGE, block_size=6), DRAFT)}, "block_size 6; pass a mu"),
        ({"shapes": (dataclasses.replace(LARGE, block_size=-4), DRAFT)}, "block_size is -4"),
        ({"shapes": (dataclasses.replace(LARGE, block_size="8"), DRAFT)}, "block_size is '8'"),
        ({"shapes": (STATE, DRAFT), "layer_groups": (0, 1, 0, 1, 2)}, "or 0 for the same, and 0"),
    ],
)
def test_invalid_shapes_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        dataclasses.replace(LAYOUT, **fields)


def test_the_check_of_a_large_layout_takes_linear_time() -> None:
    """If the check took quadratic time, it would take minutes."""
    most = 1 << 16
    changes = {"num_layers": most, "layer_groups": (0, 1) * (most // 2)}
    layout = dataclasses.replace(LAYOUT, layer_shapes=(0, 1, 0, 2) * (most // 4), **changes)
    strides = tuple((1 << 20,) * len(layer.parts) for layer in layout.of_layers)
    check_hello(Hello(NEWEST, "peer", 1, layout, 1, strides, permutes=False))
    assert plan_transfer(layout, layout).first_grants[-1] == most + most // 4
    assert bytes_per_token(layout, layout) * layout.block_size == layout.stack_bytes
    with pytest.raises(InvalidArgument, match="shapes has a length of 65; use 64 or less"):
        dataclasses.replace(LAYOUT, shapes=(DRAFT,) * 65)
