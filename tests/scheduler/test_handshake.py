from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvxfer.errors import InvalidArgument, LayoutMismatch, UnknownInstance
from kvxfer.layout import KvLayout, LayerShape
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.handshake import shake_hands
from kvxfer.transfers import PlannedCopy, PlannedLayer, PlanSummary, RankPair
from verify.processes.control_plane import LAYOUT, worker

OPAQUE = {"order": "HND", "kv": "opaque"}
STATE = {"kv": "state", "order": "HND"}


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
    assert hands.prefill.engine_address == "kvx://127.0.0.1:1/p"
    assert hands.decode.engine_address == "kvx://127.0.0.1:1/d"
    assert hands.decode.epoch == (await registry.instance("d")).epoch
    assert hands.fabrics == ("local", "tcp")
    # 2 layers of K and V: 16 tokens, 2 heads of 8 float32
    assert hands.plan == PlanSummary(
        prefill_rank=0,
        decode_rank=0,
        layers=2,
        cycle_tokens=16,
        runs_per_cycle=4,
        bytes_per_cycle=2 * 2 * 16 * 2 * 8 * 4,
        prefill_block_size=16,
        decode_block_size=16,
        permutes=False,
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
    assert hands.rank_pairs == (
        RankPair(prefill_rank=0, decode_rank=0, layers=2, bytes_per_token=2 * 2 * 2 * 8 * 4),
    )


@pytest.mark.parametrize(
    ("change", "cycle", "runs", "permutes"),
    [
        ({"block_size": 32}, 32, 2 * 2 * 2, False),
        ({"order": "HND"}, 16, 2 * 2, True),
        ({"kv": "interleaved"}, 16, 2 * 2, False),
    ],
)
async def test_other_block_sizes_and_orders_map(registry, change, cycle, runs, permutes):
    await registry.register(worker("other", "decode", layout=replace(LAYOUT, **change)))
    plan = (await shake_hands(registry, "p", "other")).plan
    assert (plan.cycle_tokens, plan.runs_per_cycle, plan.permutes) == (cycle, runs, permutes)
    assert plan.bytes_per_cycle == cycle * 2 * 2 * 2 * 8 * 4
    copied = sum(copy.bytes for layer in plan.layer_map for copy in layer.copies)
    assert copied == plan.bytes_per_cycle


async def test_instances_with_all_their_ranks_map(registry):
    ranks = tuple(f"kvx://127.0.0.1:{rank + 1}/r" for rank in range(2))
    for field in ("tp_size", "pp_size"):
        layout = replace(LAYOUT, **{field: 2})
        await registry.register(worker(field, "both", layout=layout, rank_addresses=ranks))
    for prefill, decode, expected in (
        ("p", "tp_size", [(0, 0), (0, 1)]),
        ("pp_size", "d", [(0, 0), (1, 0)]),
        ("tp_size", "pp_size", [(0, 0), (1, 0), (0, 1), (1, 1)]),
    ):
        hands = await shake_hands(registry, prefill, decode)
        assert [(pair.prefill_rank, pair.decode_rank) for pair in hands.rank_pairs] == expected
    assert hands.prefill.rank_addresses == ranks


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
                ("block_size", 1999, {}),
                ("tp_size", 2, {}),
                ("tp_rank", 1, {"tp_size": 2}),
                ("pp_size", 2, {}),
                ("pp_rank", 1, {"pp_size": 2}),
                ("mla", True, {"num_kv_heads": 1}),
                ("packing", "neon", OPAQUE),
                ("sections", (1, 7), STATE),
                ("layer_groups", (0,) * LAYOUT.num_layers, {}),
                ("layer_shapes", (0, 1), {"shapes": (LayerShape(2, 8, "uint8"),)}),
            )
        ),
    ],
)
async def test_pair_that_does_not_map_is_refused_by_the_field(field, change):
    prefill: dict[str, object] = {}
    if field.endswith("_rank"):  # the sizes must be equal, so that the ranks differ
        size = field.replace("rank", "size")
        prefill = {"layout": replace(LAYOUT, **{size: 2})}
    if field == "mla":
        prefill = {"layout": replace(LAYOUT, num_kv_heads=1)}
    if field == "sections":
        prefill = {"layout": replace(LAYOUT, sections=(8,), **STATE)}
    if field == "packing":
        prefill = {"layout": replace(LAYOUT, packing="vec", **OPAQUE)}
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
    refused = {field for field, _ in marks[0].args[1]}
    map_always = {"order", "kv"}
    compared_by_their_fields = {"shapes"}
    assert refused | map_always | compared_by_their_fields == {
        "model",
        "fabrics",
        *(field.name for field in fields(KvLayout)),
    }


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
async def test_invalid_pair_is_refused(registry, prefill_id, decode_id, error, text):
    with pytest.raises(error, match=text):
        await shake_hands(registry, prefill_id, decode_id)
