from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgument, LayoutMismatch, UnknownInstance
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.handshake import shake_hands
from kvxfer.transfers import PlanSummary
from tests.control_plane import worker


@pytest.fixture
async def registry() -> EmbeddedRegistry:
    registry = EmbeddedRegistry()
    await registry.register(worker("p", "prefill", fabrics=("verbs", "local", "tcp")))
    await registry.register(worker("d", "decode", fabrics=("tcp", "local")))
    await registry.register(worker("d32", "decode", block_size=32))
    await registry.register(worker("qwen", "decode", model="qwen"))
    await registry.register(worker("far", "decode", fabrics=("ofi",)))
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
    )


async def test_role_both_takes_either_side(registry):
    assert (await shake_hands(registry, "a", "d")).prefill.instance_id == "a"
    assert (await shake_hands(registry, "p", "a")).decode.instance_id == "a"


@pytest.mark.parametrize(
    ("decode_id", "field"), [("d32", "block_size"), ("qwen", "model"), ("far", "fabrics")]
)
async def test_pair_that_does_not_map_is_refused_by_the_field(registry, decode_id, field):
    with pytest.raises(LayoutMismatch) as mismatch:
        await shake_hands(registry, "p", decode_id)
    assert mismatch.value.field == field


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
