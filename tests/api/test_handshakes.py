from __future__ import annotations

from .conftest import join, problem


async def shake(api, prefill_id: str, decode_id: str):
    return await api.post("/v1/handshakes", json={"prefill_id": prefill_id, "decode_id": decode_id})


async def test_pair_that_maps_gets_both_addresses_and_the_plan(api):
    prefill, decode = await join(api, "p"), await join(api, "d", "decode", fabrics=["tcp"])
    answer = await shake(api, "p", "d")
    assert answer.status_code == 200
    assert answer.json() == {
        "prefill": {
            "instance_id": "p",
            "epoch": prefill["epoch"],
            "engine_address": "kvx://127.0.0.1:7400/p",
            "http_address": "http://127.0.0.1:8000",
        },
        "decode": {
            "instance_id": "d",
            "epoch": decode["epoch"],
            "engine_address": "kvx://127.0.0.1:7400/d",
            "http_address": "http://127.0.0.1:8000",
        },
        "fabrics": ["tcp"],
        "plan": {
            "layers": 2,
            "copies_per_block": 4,
            "bytes_per_block": 4096,
            "prefill_block_size": 16,
            "decode_block_size": 16,
        },
    }


async def test_layouts_that_do_not_map_are_refused_by_the_field(api):
    await join(api, "p")
    await join(api, "d", "decode", block_size=32)
    body = problem(await shake(api, "p", "d"), 409, "layout-mismatch")
    assert (body["field"], body["prefill"], body["decode"]) == ("block_size", 16, 32)


async def test_unknown_and_misused_instances_are_named(api):
    await join(api, "p")
    assert problem(await shake(api, "p", "d"), 404, "unknown-instance")["instance_id"] == "d"
    await join(api, "d", "decode")
    body = problem(await shake(api, "d", "p"), 422, "invalid-argument")
    assert "whose role is decode" in body["detail"]
