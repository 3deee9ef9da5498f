from __future__ import annotations

import json

import msgspec
import pytest

from kvxfer.instances import InstanceList, Load
from kvxfer.kv_versions import VERSIONS

from .conftest import LEASE, join, problem, registration


async def test_registration_answers_with_the_lease_and_the_location(api, clock):
    answer = await api.post("/v1/instances", json=registration("p", state="joining"))
    lease = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == "/v1/instances/p"
    assert lease == {
        "instance_id": "p",
        "epoch": lease["epoch"],
        "state": "joining",
        "lease_seconds": LEASE,
        "heartbeat_interval": LEASE / 3,
        "role": "prefill",
        "reserved": {"transfers": 0, "blocks": 0},
        "drain_seconds": None,
        "at": clock.unix(),
        "secret": None,
    }


async def test_instance_is_read_as_it_was_registered(api, clock):
    body = registration(
        "p", labels={"zone": "a"}, fabrics=["tcp"], rank_addresses=["kvx://127.0.0.1:1/p"]
    )
    lease = (await api.post("/v1/instances", json=body)).json()
    told = (await api.get("/v1/instances/p")).json()
    del body["incarnation"]
    assert told == {
        **body,
        "has_secret": False,
        "epoch": lease["epoch"],
        "registered_at": clock.unix(),
        "heartbeat_at": clock.unix(),
        "load": json.loads(msgspec.json.encode(Load())),
        "reserved": {"transfers": 0, "blocks": 0},
        "prefilling": {"transfers": 0, "tokens": 0},
        "started": 0,
        "drain_deadline": None,
    }


async def test_shortest_registration_gets_defaults(api):
    body = registration("p")
    for name in ("fabrics", "labels", "state", "incarnation", "rank_addresses"):
        del body[name]
    body["layout"] = {
        name: body["layout"][name]
        for name in ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size")
    }
    assert (await api.post("/v1/instances", json=body)).status_code == 201
    told = (await api.get("/v1/instances/p")).json()
    assert (told["state"], told["fabrics"]) == ("joining", ["local", "tcp"])
    assert told["layout"] == registration("p")["layout"]


async def test_kv_versions_of_a_worker_that_reports_none_are_the_first(api):
    told = registration("p")
    silent = registration("old")
    del silent["kv_versions"]
    for body in (told, silent):
        assert (await api.post("/v1/instances", json=body)).status_code == 201
    listed = (await api.get("/v1/instances")).json()["instances"]
    versions = {each["instance_id"]: each["kv_versions"] for each in listed}
    assert versions == {"p": list(VERSIONS), "old": [7, 7]}


async def test_registration_of_a_newer_worker_is_accepted_without_unknown_members(api):
    known = registration("p")
    layout = {**known["layout"], "scales": "per-head"}
    answer = await api.post("/v1/instances", json={**known, "layout": layout, "nics": 8})
    assert answer.status_code == 201
    told = (await api.get("/v1/instances/p")).json()
    assert told["layout"] == known["layout"]
    assert "nics" not in told
    blocks = {"epoch": answer.json()["epoch"], "added": ["0" * 16], "tier": "host"}
    published = await api.post("/v1/instances/p/blocks", json=blocks)
    assert (published.status_code, published.json()["held"]) == (200, 1)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/instances/p/role", {"role": "decode", "surprise": 1}),
        ("POST", "/v1/instances/p/drain", {"surprise": 1}),
        ("POST", "/v1/handshakes", {"prefill_id": "p", "decode_id": "d", "surprise": 1}),
        ("POST", "/v1/transfers", {"surprise": 1}),
    ],
)
async def test_unknown_members_are_ignored_and_named(api, method, path, body):
    for name, role in (("p", "prefill"), ("d", "decode")):
        await join(api, name, role)
    answer = await api.request(method, path, json={**body, "later": {"a": 1}, "Bad\r\nName": 2})
    assert answer.is_success, answer.text
    assert answer.headers["kvxfer-ignored"] == "later, surprise"
    del body["surprise"]
    again = await api.request(method, path, json=body)
    assert "kvxfer-ignored" not in again.headers


async def test_unknown_members_of_members_are_named_but_not_those_of_heartbeats(api):
    body = registration("p")
    body["layout"] = {**body["layout"], "scales": "per-head"}
    answer = await api.post("/v1/instances", json=body)
    assert answer.headers["kvxfer-ignored"] == "scales"
    beat = {"epoch": answer.json()["epoch"], "mood": "good"}
    answer = await api.put("/v1/instances/p/heartbeat", json=beat)
    assert (answer.status_code, "kvxfer-ignored" in answer.headers) == (200, False)


async def test_rank_addresses_are_those_of_all_ranks_or_none(api):
    layout = {**registration("p")["layout"], "tp_size": 2}
    ranks = ["kvx://10.0.0.1:7400/a", "kvx://10.0.0.1:7401/b"]
    body = registration("p", layout=layout, rank_addresses=ranks[:1])
    said = problem(await api.post("/v1/instances", json=body), 422, "invalid-argument")
    assert "rank_addresses has 1 addresses, the layout 2 ranks" in str(said)
    body["rank_addresses"] = ranks
    assert (await api.post("/v1/instances", json=body)).status_code == 201
    assert (await api.get("/v1/instances/p")).json()["rank_addresses"] == ranks


async def test_duplicate_of_a_live_id_is_refused_with_a_remedy(api, clock):
    lease = await join(api, "p")
    clock.advance(2)
    other = registration("p", http_address="http://10.0.0.6:8000")
    body = problem(await api.post("/v1/instances", json=other), 409, "instance-exists")
    assert "make it unique for each replica" in body["detail"]
    assert (body["instance_id"], body["epoch"]) == ("p", lease["epoch"])
    assert body["lease_remaining_seconds"] == pytest.approx(LEASE - 2)


async def test_id_is_free_with_a_new_epoch_once_the_lease_is_over(api, clock):
    first = await join(api, "p")
    clock.advance(LEASE)
    second = await join(api, "p")
    assert second["epoch"] > first["epoch"]


async def test_same_incarnation_registers_again_with_a_new_epoch(api):
    first = await join(api, "p", incarnation="abc")
    second = await join(api, "p", incarnation="abc")
    assert second["epoch"] > first["epoch"]


async def test_an_engine_without_an_http_api_is_paired(api):
    await join(api, "p", http_address="")
    await join(api, "d", "decode", http_address="")
    opened = (await api.post("/v1/transfers", json={})).json()
    assert [opened[side]["http_address"] for side in ("prefill", "decode")] == ["", ""]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"instance_id": ""}, "instance_id", "pattern"),
        ({"instance_id": "a/b"}, "instance_id", "pattern"),
        ({"instance_id": "-a"}, "instance_id", "pattern"),
        ({"instance_id": "x" * 129}, "instance_id", "pattern"),
        ({"instance_id": "watch"}, "", "instance_id is 'watch', which is the name of a route"),
        (
            {"engine_address": "kvx://0.0.0.0:7400/9f"},
            "",
            "engine_address is 'kvx://0.0.0.0:7400/9f'",
        ),
        ({"engine_address": "kvx://fd00::1:7400/9f"}, "", "IPv6 address stands in brackets"),
        ({"http_address": "http://fd00::1:8100"}, "", "http_address is 'http://fd00::1:8100'"),
        ({"http_address": "http://h:1/"}, "", "write it as http://HOST:PORT"),
        ({"http_address": "http://[::]:8000"}, "", "give one of its host's"),
        ({"bootstrap_address": "0.0.0.0:8998"}, "", "where a server listens"),
        ({"kv_versions": [8, 7]}, "", "kv_versions is [8, 7]; give the oldest version first"),
        ({"role": "chef"}, "role", "'prefill', 'decode' or 'both'"),
        ({"model": ""}, "model", "at least 1 character"),
        ({"engine_address": "tcp://h:1"}, "engine_address", "pattern"),
        ({"http_address": "h:1"}, "http_address", "pattern"),
        ({"num_blocks": 0}, "num_blocks", "greater than or equal to 1"),
        ({"fabrics": []}, "fabrics", "at least 1"),
        ({"labels": {"a": 1}}, "labels.a", "string"),
        ({"state": "draining"}, "state", "'joining' or 'ready'"),
    ],
)
async def test_invalid_registration_names_the_member(api, change, field, words):
    answer = await api.post("/v1/instances", json={**registration("p"), **change})
    body = problem(answer, 422, "invalid-argument")
    assert body["field"] == field
    assert words in body["detail"]
    assert (await api.get("/v1/instances")).json() == {"instances": [], "stale_seconds": None}


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"block_size": 0}, "layout.block_size", "greater than or equal to 1"),
        ({"order": "DNH"}, "layout.order", "'NHD' or 'HND'"),
        ({"dtype": "float7"}, "layout", "KvLayout.dtype is 'float7'"),
        ({"tp_size": 3}, "layout", "KvLayout.tp_size is 3 for 2 KV heads"),
        ({"tp_rank": 1}, "layout", "KvLayout.tp_rank is 1 of tp_size 1"),
    ],
)
async def test_invalid_layout_names_the_member(api, change, field, words):
    body = registration("p")
    body["layout"] = {**body["layout"], **change}
    answer = problem(await api.post("/v1/instances", json=body), 422, "invalid-argument")
    assert answer["field"] == field
    assert words in answer["detail"]
    assert not answer["detail"].startswith("layout: Value error")


async def test_list_is_filtered_by_role_model_and_state(api):
    await join(api, "p1")
    await join(api, "p2", state="joining")
    await join(api, "d1", "decode", model="qwen")
    await join(api, "b1", "both")

    async def listed(**query: str) -> list[str]:
        answer = await api.get("/v1/instances", params=query)
        return [instance["instance_id"] for instance in answer.json()["instances"]]

    assert await listed() == ["b1", "d1", "p1", "p2"]
    assert await listed(role="prefill") == ["b1", "p1", "p2"]
    assert await listed(role="decode") == ["b1", "d1"]
    assert await listed(role="both") == ["b1"]
    assert await listed(model="qwen") == ["d1"]
    assert await listed(state="joining") == ["p2"]
    assert await listed(role="prefill", model="llama", state="ready") == ["b1", "p1"]
    for query in ({"role": "chef"}, {"state": "gone"}):
        problem(await api.get("/v1/instances", params=query), 422, "invalid-argument")


async def test_heartbeat_renews_the_lease_and_takes_state_and_load(api, clock):
    lease = await join(api, "p", state="joining")
    clock.advance(LEASE * 0.9)
    beat = {
        "epoch": lease["epoch"],
        "state": "ready",
        "load": {"running": 3, "waiting": 1, "free_blocks": 9},
    }
    answer = await api.put("/v1/instances/p/heartbeat", json=beat)
    assert answer.status_code == 200
    del lease["secret"]
    assert answer.json() == {**lease, "state": "ready", "at": clock.unix()}
    clock.advance(LEASE * 0.9)
    told = (await api.get("/v1/instances/p")).json()
    assert (told["state"], told["load"]) == (
        "ready",
        json.loads(msgspec.json.encode(Load(running=3, waiting=1, free_blocks=9))),
    )


async def test_heartbeat_of_a_newer_worker_is_accepted_without_unknown_members(api):
    lease = await join(api, "p")
    load = {"running": 3, "temperature": 61}
    beat = {"epoch": lease["epoch"], "load": load, "weather": "fair"}
    answer = await api.put("/v1/instances/p/heartbeat", json=beat)
    assert answer.status_code == 200
    load = (await api.get("/v1/instances/p")).json()["load"]
    assert load["running"] == 3
    assert "temperature" not in load


async def test_heartbeat_tells_a_worker_that_it_is_drained(api):
    lease = await join(api, "p")
    beat = {"epoch": lease["epoch"], "state": "draining"}
    await api.put("/v1/instances/p/heartbeat", json=beat)
    answer = await api.put("/v1/instances/p/heartbeat", json={**beat, "state": "ready"})
    assert answer.json()["state"] == "draining"


async def test_heartbeat_of_a_lost_lease_is_stale(api, clock):
    lease = await join(api, "p")
    clock.advance(LEASE)
    answer = await api.put("/v1/instances/p/heartbeat", json={"epoch": lease["epoch"]})
    body = problem(answer, 409, "stale-epoch")
    assert (body["instance_id"], body["epoch"]) == ("p", lease["epoch"])
    assert "register again" in body["detail"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"epoch": 0}, "epoch"),
        ({"state": "gone"}, "state"),
        ({"load": {"running": -1}}, "load.running"),
    ],
)
async def test_invalid_heartbeat_names_the_member(api, change, field):
    lease = await join(api, "p")
    beat = {"epoch": lease["epoch"], **change}
    answer = await api.put("/v1/instances/p/heartbeat", json=beat)
    assert problem(answer, 422, "invalid-argument")["field"] == field


async def test_deregistered_instance_is_gone(api):
    lease = await join(api, "p")
    stale = await api.delete("/v1/instances/p", params={"epoch": lease["epoch"] - 1})
    problem(stale, 409, "stale-epoch")
    answer = await api.delete("/v1/instances/p", params={"epoch": lease["epoch"]})
    assert (answer.status_code, answer.content) == (204, b"")
    body = problem(await api.get("/v1/instances/p"), 404, "unknown-instance")
    assert body["instance_id"] == "p"
    again = await api.delete("/v1/instances/p", params={"epoch": lease["epoch"]})
    problem(again, 404, "unknown-instance")


async def test_deregistration_takes_an_epoch(api):
    await join(api, "p")
    body = problem(await api.delete("/v1/instances/p"), 422, "invalid-argument")
    assert (body["field"], body["errors"][0]["location"]) == ("epoch", "query")


async def test_listed_instances_match_the_schema(api):
    await join(api, "p", labels={"zone": "ä"}, fabrics=("verbs", "tcp"))
    lease = await join(api, "d", "decode")
    beat = {"epoch": lease["epoch"], "load": {"running": 2}}
    await api.put("/v1/instances/d/heartbeat", json=beat)
    listed = (await api.get("/v1/instances")).json()
    assert json.loads(msgspec.json.encode(msgspec.convert(listed, InstanceList))) == listed
    assert listed["instances"] == [
        (await api.get(f"/v1/instances/{name}")).json() for name in ("d", "p")
    ]


# --- requests of operators -------------------------------------------------------------------


async def test_drain_answers_with_the_instance_and_its_deadline(api, clock):
    lease = await join(api, "p")
    answer = await api.post("/v1/instances/p/drain", json={"deadline_seconds": 30})
    told = answer.json()
    assert answer.status_code == 202
    assert (told["state"], told["drain_deadline"]) == ("draining", clock.unix() + 30)
    beat = await api.put("/v1/instances/p/heartbeat", json={"epoch": lease["epoch"]})
    assert (beat.json()["state"], beat.json()["drain_seconds"]) == ("draining", 30)


async def test_drain_without_a_body_takes_a_minute(api, clock):
    await join(api, "p")
    told = (await api.post("/v1/instances/p/drain")).json()
    assert told["drain_deadline"] == clock.unix() + 60


async def test_role_is_changed_for_new_transfers_and_in_the_lease(api):
    lease = await join(api, "a")
    await join(api, "b")
    problem(await api.post("/v1/transfers", json={}), 503, "no-capacity")
    told = (await api.post("/v1/instances/a/role", json={"role": "decode"})).json()
    assert (told["role"], told["epoch"]) == ("decode", lease["epoch"])
    transfer = (await api.post("/v1/transfers", json={})).json()
    assert transfer["decode"]["instance_id"] == "a"
    beat = await api.put("/v1/instances/a/heartbeat", json={"epoch": lease["epoch"]})
    assert (beat.json()["role"], beat.json()["reserved"]["transfers"]) == ("decode", 1)


@pytest.mark.parametrize("what", ["drain", "role"])
async def test_operator_must_name_a_registered_instance(api, what):
    answer = await api.post(
        f"/v1/instances/p/{what}", json={"role": "decode"} if what == "role" else {}
    )
    problem(answer, 404, "unknown-instance")


@pytest.mark.parametrize(
    ("what", "body", "field"),
    [
        ("drain", {"deadline_seconds": -1}, "deadline_seconds"),
        ("drain", {"deadline_seconds": 1e9}, "deadline_seconds"),
        ("role", {}, "role"),
        ("role", {"role": "cook"}, "role"),
    ],
)
async def test_invalid_order_names_the_member(api, what, body, field):
    await join(api, "p")
    answer = await api.post(f"/v1/instances/p/{what}", json=body)
    assert problem(answer, 422, "invalid-argument")["field"] == field


async def test_published_blocks_attract_prompts_and_the_answer_says_why(api):
    await join(api, "p")
    lease = await join(api, "q")
    await join(api, "d", "decode")
    blocks = ["000000000000000a", "ffffffffffffffff"]
    body = {"epoch": lease["epoch"], "added": blocks}
    answer = await api.post("/v1/instances/q/blocks", json=body)
    assert (answer.status_code, answer.json()) == (200, {"held": 2, "capacity": 32768})
    request = {"prefix_hashes": blocks, "explain": True}
    opened = (await api.post("/v1/transfers", json=request)).json()
    assert opened["prefill"]["instance_id"] == "q"
    assert opened["score"] == {
        "cost": -0.016,
        "prefill": {
            "running": 0.0,
            "waiting": 0.0,
            "tokens": 0.0,
            "reserved": 0.0,
            "occupancy": 0.0,
        },
        "decode": {
            "running": 0.0,
            "waiting": 0.0,
            "tokens": 0.0,
            "reserved": 0.0,
            "occupancy": 0.0,
            "decode_prefix": 0.0,
        },
        "pair": {"distance": 0.0, "fabric": 0.0, "prefix": -0.016},
        "distance": 0,
        "prefix_tokens": 32,
        "decode_prefix_tokens": 0,
    }
    again = (await api.get(f"/v1/transfers/{opened['transfer_id']}")).json()
    assert again["score"] == opened["score"]
    assert (await api.post("/v1/transfers", json={})).json()["score"] is None


@pytest.mark.parametrize(
    "added", [["xyz"], ["0A" * 8], [1], ["00" * 8] * 1025], ids=["short", "case", "number", "many"]
)
async def test_invalid_hashes_are_refused(api, added):
    lease = await join(api, "p")
    body = {"epoch": lease["epoch"], "added": added}
    refused = problem(await api.post("/v1/instances/p/blocks", json=body), 422, "invalid-argument")
    assert refused["field"].startswith("added")


async def test_blocks_of_another_epoch_are_stale(api):
    await join(api, "p")
    answer = await api.post("/v1/instances/p/blocks", json={"epoch": 1})
    problem(answer, 409, "stale-epoch")
