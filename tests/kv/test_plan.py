from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.errors import LayoutMismatch
from kvxfer.kv.plan import StridedCopy, blocks_match, plan_transfer
from kvxfer.layout import KvLayout

BASE = KvLayout(num_layers=4, num_kv_heads=8, head_size=64, dtype="bfloat16", block_size=16)
MLA = KvLayout(
    num_layers=4, num_kv_heads=1, head_size=576, dtype="bfloat16", block_size=16, mla=True
)
VECTOR = 128  # bytes of a head of BASE


def base(**changes: Any) -> KvLayout:
    return dataclasses.replace(BASE, **changes)


def copies_between(prefill: KvLayout, decode: KvLayout, **options: Any) -> tuple[StridedCopy, ...]:
    """Returns the copies of a layer, which are equal for all layers."""
    [copies] = {layer.copies for layer in plan_transfer(prefill, decode, **options).layers}
    return copies


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (BASE, (StridedCopy("K", "K", 16384), StridedCopy("V", "V", 16384))),
        (base(order="HND"), (StridedCopy("K", "K", 16384), StridedCopy("V", "V", 16384))),
        (base(kv="interleaved"), (StridedCopy("KV", "KV", 32768),)),
        (MLA, (StridedCopy("KV", "KV", 18432),)),
        (
            base(tp_size=2, tp_rank=1),
            (StridedCopy("K", "K", 8192), StridedCopy("V", "V", 8192)),
        ),
    ],
)
def test_equal_layouts_copy_whole_blocks_of_every_layer(
    layout: KvLayout, copies: tuple[StridedCopy, ...]
) -> None:
    plan = plan_transfer(layout, layout)
    assert [(layer.src_layer, layer.dst_layer) for layer in plan.layers] == [
        (index, index) for index in range(4)
    ]
    assert {layer.copies for layer in plan.layers} == {copies}
    assert plan.bytes_per_cycle == 4 * layout.block_bytes
    assert plan.cycle_tokens == layout.block_size == 16
    assert not plan.permutes


def test_layers_map_by_their_index_in_the_whole_model() -> None:
    stage = base(pp_size=2, pp_rank=1)
    for prefill, decode, expected in (
        (stage, stage, [(0, 0), (1, 1)]),
        (stage, BASE, [(0, 2), (1, 3)]),
        (BASE, stage, [(2, 0), (3, 1)]),
        (base(pp_size=4, pp_rank=2), stage, [(0, 0)]),
        (base(pp_size=4, pp_rank=1), stage, []),
    ):
        layers = plan_transfer(prefill, decode).layers
        assert [(layer.src_layer, layer.dst_layer) for layer in layers] == expected


def test_a_rank_of_fewer_heads_is_one_run_per_token_in_nhd_and_one_per_block_in_hnd() -> None:
    half = {"tp_size": 2, "tp_rank": 1}
    of_token = {"length": 4 * VECTOR, "count": 16}
    assert copies_between(base(**half), BASE)[0] == StridedCopy(
        "K", "K", **of_token,
        dst_offset=4 * VECTOR, src_stride=4 * VECTOR, dst_stride=8 * VECTOR,
    )  # fmt: skip
    assert copies_between(BASE, base(**half))[1] == StridedCopy(
        "V", "V", **of_token,
        src_offset=4 * VECTOR, src_stride=8 * VECTOR, dst_stride=4 * VECTOR,
    )  # fmt: skip
    hnd = base(order="HND")
    assert copies_between(base(order="HND", **half), hnd)[0] == StridedCopy(
        "K", "K", 4 * 16 * VECTOR, dst_offset=4 * 16 * VECTOR
    )


def test_a_large_block_is_filled_by_several_small_ones() -> None:
    small, large = base(block_size=32, kv="interleaved"), base(block_size=128)
    plan = plan_transfer(small, large)
    assert plan.cycle_tokens == 128
    token = 8 * VECTOR
    assert copies_between(small, large) == tuple(
        StridedCopy(
            "KV",
            part,
            32 * token,
            src_block=block,
            src_offset=vector * 32 * token,
            dst_offset=block * 32 * token,
        )
        for block in range(4)
        for vector, part in enumerate(("K", "V"))
    )


def test_block_sizes_that_do_not_divide_meet_in_a_cycle() -> None:
    copies = copies_between(base(block_size=4), base(block_size=6))
    token = 8 * VECTOR
    assert [
        (copy.src_block, copy.src_offset, copy.dst_block, copy.dst_offset, copy.length)
        for copy in copies
        if copy.src_part == "K"
    ] == [
        (0, 0, 0, 0, 4 * token),
        (1, 0, 0, 4 * token, 2 * token),
        (1, 2 * token, 1, 0, 2 * token),
        (2, 0, 1, 2 * token, 4 * token),
    ]


@pytest.mark.parametrize(
    ("orders", "changes", "run", "permutes"),
    [
        # Layouts that differ only in the order copy whole blocks.
        (("NHD", "HND"), ({}, {}), 16 * 8 * VECTOR, True),
        (("HND", "NHD"), ({}, {}), 16 * 8 * VECTOR, True),
        # From several prefill ranks, each block arrives in prefill's order.
        (("HND", "NHD"), ({"tp_size": 2}, {}), 16 * 4 * VECTOR, True),
        (("NHD", "HND"), ({"tp_size": 2}, {}), 4 * VECTOR, True),
        (("HND", "NHD"), ({"block_size": 4}, {}), 4 * VECTOR, True),
        (("NHD", "HND"), ({"block_size": 4}, {}), 4 * 8 * VECTOR, True),
        # One head of a block, or one token, has the same bytes in both orders: the longer runs win.
        (("NHD", "HND"), ({"tp_size": 8}, {}), 16 * VECTOR, False),
        (("NHD", "NHD"), ({"tp_size": 8}, {}), 16 * VECTOR, True),
        (("HND", "HND"), ({"block_size": 1}, {}), 8 * VECTOR, True),
        (("HND", "NHD"), ({"block_size": 1}, {}), 8 * VECTOR, False),
        (("HND", "NHD"), ({}, {"tp_size": 8}), 16 * VECTOR, False),
        (("HND", "NHD"), ({}, {"block_size": 1}), VECTOR, False),
    ],
)
def test_the_order_of_arrival_makes_the_longest_runs(
    orders: tuple[Any, Any],
    changes: tuple[dict[str, Any], dict[str, Any]],
    run: int,
    permutes: bool,
) -> None:
    prefill, decode = (
        base(order=order, **change) for order, change in zip(orders, changes, strict=True)
    )
    assert {copy.length for copy in copies_between(prefill, decode)} == {run}
    assert plan_transfer(prefill, decode).permutes is permutes
    assert not plan_transfer(prefill, decode, decode_permutes=False).permutes


def test_heads_are_copied_one_by_one_if_decode_cannot_reorder_them() -> None:
    copies = copies_between(BASE, base(order="HND"), decode_permutes=False)
    assert {copy.length for copy in copies} == {VECTOR}
    assert sum(copy.count for copy in copies) == 2 * 16 * 8


def test_ranks_with_nothing_to_move_have_an_empty_plan() -> None:
    ranks = [base(tp_size=2, tp_rank=rank) for rank in (0, 1)]
    assert plan_transfer(*ranks).layers == ()
    assert plan_transfer(*ranks).bytes_per_cycle == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 8),
        ("num_kv_heads", 4),
        ("head_size", 128),
        ("dtype", "float16"),
    ],
)
def test_another_model_is_refused_by_the_name_of_the_field(field: str, value: Any) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(BASE, base(**{field: value}))
    error = caught.value
    assert (error.field, error.prefill, error.decode) == (field, getattr(BASE, field), value)
    assert field in str(error)


@pytest.mark.parametrize(
    ("other", "field"),
    [({"kv": "interleaved"}, "kv"), ({"kv": "joined", "packing": "int8"}, "packing")],
)
def test_joined_vectors_map_only_onto_the_same_form(other: dict[str, Any], field: str) -> None:
    for pair in ((base(kv="joined"), base(**other)), (base(**other), base(kv="joined"))):
        with pytest.raises(LayoutMismatch) as caught:
            plan_transfer(*pair)
        assert caught.value.field == field


def test_mla_does_not_map_onto_heads() -> None:
    heads = dataclasses.replace(MLA, mla=False)
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(MLA, heads)
    assert caught.value.field == "mla"


@pytest.mark.parametrize(
    ("sizes", "blocks", "match"),
    [
        ((16, 16), (3, 3), True),
        ((16, 16), (3, 4), False),
        ((32, 128), (5, 2), True),
        ((32, 128), (4, 1), True),
        ((32, 128), (4, 2), False),
        ((32, 128), (5, 1), False),
        ((16, 48), (1, 1), True),
        ((48, 16), (1, 4), False),
    ],
)
def test_block_tables_match_if_some_prompt_has_both_lengths(
    sizes: tuple[int, int], blocks: tuple[int, int], match: bool
) -> None:
    prefill, decode = (base(block_size=size) for size in sizes)
    assert blocks_match(prefill, blocks[0], decode, blocks[1]) is match
    prompts = {(prefill.blocks_for(tokens), decode.blocks_for(tokens)) for tokens in range(1, 300)}
    assert match is (blocks in prompts)
