from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvxfer.errors import InvalidArgument, LayoutMismatch, UnknownInstance
from kvxfer.kv.layout import KvLayout
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.handshake import shake_hands
from kvxfer.transfers import PlannedCopy, PlannedLayer, PlanSummary
from tests.control_plane import LAYOUT, worker


@pytest.fixture
async def registry() -> EmbeddedRegistry:
    registry = EmbeddedRegistry()
    await registry.register(worker("p", "prefill", fabrics=("verbs", "local", "tcp")))
    await registry.register(worker("d", "decode", fabrics=("tcp", "local")))
    await registry.register(worker("d32", "decode", block_size=32))
    await registry.register(worker("a", "both"))
    return registry


async def test_pair_that_maps_gets_addresses_fabrics_and_plan(registry):
    hands = await shake_hands(registry, "p", "d")
    assert hands.prefill.engine_address == "kvx://127.0.0.1:7400/p"
    assert hands.decode.engine_address == "kvx://127.0.0.1:7400/d"
    assert hands.decode.epoch == (await registry.instance("d")).epoch
    assert hands.fabrics == ("local", "tcp")
    # 2 layers of K and V: 16 tokens, 2 heads of 8 float32
    assert hands.plan == PlanSummary(
        layers=2,
        copies_per_block=4,
        bytes_per_block=2 * 2 * 16 * 2 * 8 * 4,
        prefill_block_size=16,
        decode_block_size=16,
        layer_map=tuple(
            PlannedLayer(
                prefill_layer=layer,
                decode_layer=layer,
                copies=tuple(
                    PlannedCopy(prefill_part=part, decode_part=part, runs=1, bytes=16 * 2 * 8 * 4)
                    for part in ("K", "V")
                ),
            )
            for layer in range(2)
        ),
    )


async def test_role_both_takes_either_side(registry):
    assert (await shake_hands(registry, "a", "d")).prefill.instance_id == "a"
    assert (await shake_hands(registry, "p", "a")).decode.instance_id == "a"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", {"model": "qwen"}),
        ("fabrics", {"fabrics": ("ofi",)}),
        *(
            (field, {"layout": replace(LAYOUT, **{field: value, **also})})
            for field, value, also in (
                ("num_layers", 4, {}),
                ("num_kv_heads", 4, {}),
                ("head_size", 16, {}),
                ("dtype", "bfloat16", {}),
                ("block_size", 32, {}),
                ("tp_size", 2, {}),
                ("tp_rank", 1, {"tp_size": 2}),
                ("pp_size", 2, {}),
                ("pp_rank", 1, {"pp_size": 2}),
                ("order", "HND", {}),
                ("kv", "interleaved", {}),
                ("mla", True, {"num_kv_heads": 1}),
            )
        ),
    ],
)
async def test_pair_that_does_not_map_is_refused_by_the_field(field, change):
    prefill: dict[str, object] = {}
    if field.endswith("_rank"):  # the sizes have to be the same for the ranks to be what differs
        size = field.replace("rank", "size")
        prefill = {"layout": replace(LAYOUT, **{size: 2})}
    if field == "mla":
        prefill = {"layout": replace(LAYOUT, num_kv_heads=1)}
    registry = EmbeddedRegistry()
    await registry.register(worker("p", "prefill", **prefill))
    await registry.register(worker("d", "decode", **change))
    with pytest.raises(LayoutMismatch) as mismatch:
        await shake_hands(registry, "p", "d")
    ours, theirs = await registry.instance("p"), await registry.instance("d")
    assert mismatch.value.field == field
    if field not in ("model", "fabrics"):
        ours, theirs = ours.layout, theirs.layout
    both = [getattr(side, field) for side in (ours, theirs)]
    if field == "fabrics":
        both = [sorted(names) for names in both]
    assert [mismatch.value.prefill, mismatch.value.decode] == both


async def test_every_field_of_a_layout_is_compared():
    marks = test_pair_that_does_not_map_is_refused_by_the_field.pytestmark
    tried = {field for field, _ in marks[0].args[1]}
    assert tried == {"model", "fabrics", *(field.name for field in fields(KvLayout))}


@pytest.mark.parametrize(
    ("prefill_id", "decode_id", "error", "text"),
    [
        ("d", "d32", InvalidArgument, "prefill_id names instance 'd', whose role is decode"),
        ("a", "p", InvalidArgument, "decode_id names instance 'p', whose role is prefill"),
        ("a", "a", InvalidArgument, "both 'a'"),
        ("nobody", "d", UnknownInstance, "'nobody'"),
        ("p", "nobody", UnknownInstance, "'nobody'"),
    ],
)
async def test_pair_that_is_none_is_refused(registry, prefill_id, decode_id, error, text):
    with pytest.raises(error, match=text):
        await shake_hands(registry, prefill_id, decode_id)
