from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvxfer.api.problem_models import LayoutMismatchProblem
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from verify.processes.control_plane import LAYOUT

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
            "engine_address": "kvx://127.0.0.1:1/p",
            "http_address": "http://127.0.0.1:9",
            "rank_addresses": [],
            "bootstrap_address": "",
        },
        "decode": {
            "instance_id": "d",
            "epoch": decode["epoch"],
            "engine_address": "kvx://127.0.0.1:1/d",
            "http_address": "http://127.0.0.1:9",
            "rank_addresses": [],
            "bootstrap_address": "",
        },
        "fabrics": ["tcp"],
        "plan": {
            "prefill_rank": 0,
            "decode_rank": 0,
            "layers": 2,
            "cycle_tokens": 16,
            "runs_per_cycle": 4,
            "bytes_per_cycle": 4096,
            "prefill_block_size": 16,
            "decode_block_size": 16,
            "permutes": False,
            "layer_map": [
                {
                    "prefill_layer": layer,
                    "decode_layer": layer,
                    "copies": [
                        {"prefill_part": part, "decode_part": part, "runs": 1, "bytes": 1024}
                        for part in ("K", "V")
                    ],
                }
                for layer in range(2)
            ],
        },
        "rank_pairs": [{"prefill_rank": 0, "decode_rank": 0, "layers": 2, "bytes_per_token": 256}],
    }


async def test_ranks_that_transfer_to_each_other_are_listed(api):
    prefill = replace(LAYOUT, tp_size=2)
    await join(api, "p", layout=prefill, rank_addresses=("kvx://h:1/a", "kvx://h:2/b"))
    await join(api, "d", "decode", order="HND", block_size=24)
    body = (await shake(api, "p", "d")).json()
    assert body["rank_pairs"] == [
        {"prefill_rank": rank, "decode_rank": 0, "layers": 2, "bytes_per_token": 128}
        for rank in (0, 1)
    ]
    plan = body["plan"]
    assert (plan["cycle_tokens"], plan["permutes"]) == (48, False)
    assert plan["bytes_per_cycle"] == 48 * 128
    assert body["prefill"]["rank_addresses"] == ["kvx://h:1/a", "kvx://h:2/b"]


@pytest.mark.parametrize(
    ("field", "change", "prefill", "decode"),
    [
        ("block_size", {"block_size": 1999}, 16, 1999),
        ("num_layers", {"layout": replace(LAYOUT, num_layers=4)}, 2, 4),
        # one rank of two; nothing is known of the other
        ("tp_size", {"layout": replace(LAYOUT, tp_size=2)}, 1, 2),
        ("dtype", {"dtype": "bfloat16"}, "float32", "bfloat16"),
        ("model", {"model": "qwen"}, "llama", "qwen"),
        ("fabrics", {"fabrics": ["ofi"]}, ["local", "tcp"], ["ofi"]),
        ("kv_versions", {"kv_versions": [9, 10]}, [7, 8], [9, 10]),
    ],
)
async def test_layouts_that_do_not_map_are_refused_by_the_field(
    api, field, change, prefill, decode
):
    await join(api, "p")
    await join(api, "d", "decode", **change)
    body = problem(await shake(api, "p", "d"), 409, "layout-mismatch")
    assert (body["field"], body["prefill"], body["decode"]) == (field, prefill, decode)
    assert LayoutMismatchProblem.model_validate(body).field == field


async def test_models_that_differ_are_refused_by_what_differs(api):
    await join(api, "p", identity={"checkpoint": "a" * 32, "rope": "{}"})
    await join(api, "same", "decode", identity={"checkpoint": "a" * 32, "rope": "{}"})
    await join(api, "other", "decode", identity={"checkpoint": "b" * 32, "rope": "{}"})
    await join(api, "silent", "decode")
    assert (await shake(api, "p", "same")).status_code == 200
    assert (await shake(api, "p", "silent")).status_code == 200, "it reports no identity"
    body = problem(await shake(api, "p", "other"), 409, "layout-mismatch")
    assert (body["field"], body["prefill"], body["decode"]) == ("checkpoint", "a" * 32, "b" * 32)
    listed = (await api.get("/v1/instances/p")).json()
    assert listed["identity"]["checkpoint"] == "a" * 32


async def test_schema_names_every_field_that_may_not_map(api):
    schema = (await api.get("/openapi.json")).json()
    refused = schema["paths"]["/v1/handshakes"]["post"]["responses"]["409"]["content"]
    assert refused["application/problem+json"]["schema"] == {
        "$ref": "#/components/schemas/LayoutMismatchProblem"
    }
    named = schema["components"]["schemas"]["LayoutMismatchProblem"]["properties"]["field"]["enum"]
    of_instance = ["model", "fabrics", "kv_versions", *ModelIdentity.__struct_fields__]
    assert named == [*of_instance, *(field.name for field in fields(KvLayout))]


async def test_unknown_and_misused_instances_are_named(api):
    await join(api, "p")
    assert problem(await shake(api, "p", "d"), 404, "unknown-instance")["instance_id"] == "d"
    await join(api, "d", "decode")
    body = problem(await shake(api, "d", "p"), 422, "invalid-argument")
    assert "whose role is decode" in body["detail"]
