from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvxfer.errors import LayoutMismatch
from kvxfer.kv.layout import KvLayout
from kvxfer.kv.plan import StridedCopy, plan_transfer

BASE = KvLayout(num_layers=4, num_kv_heads=8, head_size=64, dtype="bfloat16", block_size=16)
MLA = KvLayout(
    num_layers=4, num_kv_heads=1, head_size=576, dtype="bfloat16", block_size=16, mla=True
)


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (BASE, (StridedCopy("K", "K", 16384), StridedCopy("V", "V", 16384))),
        (dataclasses.replace(BASE, kv="interleaved"), (StridedCopy("KV", "KV", 32768),)),
        (MLA, (StridedCopy("KV", "KV", 18432),)),
        (
            dataclasses.replace(BASE, tp_size=2, tp_rank=1),
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
    assert plan.bytes_per_block == 4 * layout.block_bytes


def test_a_pipeline_stage_moves_its_own_layers_only() -> None:
    layout = dataclasses.replace(BASE, pp_size=2, pp_rank=1)
    assert len(plan_transfer(layout, layout).layers) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_layers", 5),
        ("num_kv_heads", 4),
        ("head_size", 128),
        ("dtype", "float16"),
        ("block_size", 32),
        ("tp_size", 2),
        ("pp_size", 2),
        ("order", "HND"),
        ("kv", "interleaved"),
    ],
)
def test_a_difference_is_refused_by_the_name_of_its_field(field: str, value: Any) -> None:
    decode = dataclasses.replace(BASE, **{field: value})
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(BASE, decode)
    error = caught.value
    assert (error.field, error.prefill, error.decode) == (field, getattr(BASE, field), value)
    assert field in str(error)


def test_mla_does_not_map_onto_heads() -> None:
    heads = dataclasses.replace(MLA, mla=False)
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(MLA, heads)
    assert caught.value.field == "mla"


def test_ranks_map_onto_the_same_rank() -> None:
    ranks = [dataclasses.replace(BASE, tp_size=2, tp_rank=rank) for rank in (0, 1)]
    with pytest.raises(LayoutMismatch) as caught:
        plan_transfer(*ranks)
    assert caught.value.field == "tp_rank"
