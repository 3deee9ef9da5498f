from __future__ import annotations

import asyncio

import pytest

from kvxfer.ticket import Ticket, verify_ticket
from verify.polling import eventually
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import LEASE, join, problem


async def reserved(api, instance_id: str) -> dict[str, int]:
    return (await api.get(f"/v1/instances/{instance_id}")).json()["reserved"]


async def test_transfer_names_the_pair_and_carries_a_ticket_for_exactly_it(api, clock):
    prefill, decode = await join(api, "p"), await join(api, "d", "decode")
    answer = await api.post("/v1/transfers", json={"request_id": "cmpl-7", "prompt_tokens": 40})
    body = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v1/transfers/{body['transfer_id']}"
    ticket = body.pop("ticket")
    assert body == {
        "transfer_id": body["transfer_id"],
        "request_id": "cmpl-7",
        "model": "llama",
        "prompt_tokens": 40,
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
        "prefill_blocks": 3,
        "decode_blocks": 3,
        "created_at": clock.unix(),
        "expires_at": clock.unix() + 30,
        "cached_tokens": 0,
        "alone_because": "",
        "score": None,
    }
    assert verify_ticket(ticket, CLUSTER_KEY, now=clock.unix()) == Ticket(
        transfer_id=body["transfer_id"],
        request_id="cmpl-7",
        prefill_id="p",
        prefill_epoch=prefill["epoch"],
        decode_id="d",
        decode_epoch=decode["epoch"],
        expires_at=clock.unix() + 30,
        issued_at=clock.unix(),
    )
    assert (await api.get(f"/v1/transfers/{body['transfer_id']}")).json() == body


async def test_empty_request_is_enough(api):
    await join(api, "p")
    await join(api, "d", "decode")
    body = (await api.post("/v1/transfers", json={})).json()
    assert body["request_id"] == body["transfer_id"]
    assert (body["prefill_blocks"], body["prompt_tokens"]) == (0, None)


async def test_reservation_is_given_back_by_delete(api):
    await join(api, "p")
    await join(api, "d", "decode")
    body = (await api.post("/v1/transfers", json={"prompt_tokens": 40})).json()
    assert await reserved(api, "d") == {"transfers": 1, "blocks": 3}
    where = f"/v1/transfers/{body['transfer_id']}"
    answer = await api.delete(where)
    assert (answer.status_code, answer.content) == (204, b"")
    assert await reserved(api, "d") == {"transfers": 0, "blocks": 0}
    for method in (api.get, api.delete):
        gone = problem(await method(where), 404, "unknown-transfer")
        assert gone["transfer_id"] == body["transfer_id"]


async def test_reservation_is_given_back_on_expiry(api, clock):
    leases = {"p": await join(api, "p"), "d": await join(api, "d", "decode")}
    body = (await api.post("/v1/transfers", json={"prompt_tokens": 40})).json()
    for _ in range(10):
        clock.advance(3)
        for name, lease in leases.items():
            await api.put(f"/v1/instances/{name}/heartbeat", json={"epoch": lease["epoch"]})
    problem(await api.get(f"/v1/transfers/{body['transfer_id']}"), 404, "unknown-transfer")
    assert await reserved(api, "p") == {"transfers": 0, "blocks": 0}


async def test_reservation_is_given_back_when_an_instance_dies(api, clock):
    await join(api, "p")
    clock.advance(LEASE / 2)
    await join(api, "d", "decode")
    body = (await api.post("/v1/transfers", json={"prompt_tokens": 40})).json()
    clock.advance(LEASE / 2)
    problem(await api.get("/v1/instances/p"), 404, "unknown-instance")
    assert await reserved(api, "d") == {"transfers": 0, "blocks": 0}
    problem(await api.get(f"/v1/transfers/{body['transfer_id']}"), 404, "unknown-transfer")


async def test_no_capacity_says_when_to_retry_and_what_is_missing(api):
    await join(api, "p")
    answer = await api.post("/v1/transfers", json={"model": "llama"})
    body = problem(answer, 503, "no-capacity")
    assert answer.headers["retry-after"] == "1"
    assert body["reasons"] == ["no decode instance of model 'llama' is ready (none registered)"]


async def test_draining_instance_gets_no_new_transfer(api):
    await join(api, "p")
    lease = await join(api, "d", "decode")
    assert (await api.post("/v1/transfers", json={})).status_code == 201
    beat = {"epoch": lease["epoch"], "state": "draining"}
    await api.put("/v1/instances/d/heartbeat", json=beat)
    body = problem(await api.post("/v1/transfers", json={}), 503, "no-capacity")
    assert body["reasons"] == ["no decode instance is ready (1 draining)"]


async def test_prompt_that_fits_no_cache_is_refused_for_good(api):
    await join(api, "p")
    await join(api, "d", "decode")
    answer = await api.post("/v1/transfers", json={"prompt_tokens": 64 * 16 + 1})
    body = problem(answer, 422, "prompt-too-long")
    assert "1025 tokens takes 65 KV blocks" in body["detail"]
    assert "retry-after" not in answer.headers


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"model": ""}, "model"),
        ({"avoid": ["d"] * 65}, "avoid"),
        ({"request_id": "x" * 257}, "request_id"),
    ],
)
async def test_invalid_request_names_the_member(api, body, field):
    answer = await api.post("/v1/transfers", json=body)
    assert problem(answer, 422, "invalid-argument")["field"] == field


async def test_instances_to_avoid_are_the_last_resort(api):
    for name, role in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
        await join(api, name, role)
    body = (await api.post("/v1/transfers", json={"avoid": ["d1"]})).json()
    assert body["decode"]["instance_id"] == "d2"
    both = {"avoid": ["p", "d1", "d2"], "explain": True}
    assert (await api.post("/v1/transfers", json=both)).status_code == 201
    await api.delete("/v1/instances/p", params={"epoch": body["prefill"]["epoch"]})
    answer = await api.post("/v1/transfers", json={"avoid": ["p"]})
    assert "no prefill instance is ready" in problem(answer, 503, "no-capacity")["reasons"][0]


async def test_open_transfers_are_listed_without_tickets(api):
    for name, role in (("p", "prefill"), ("d1", "decode"), ("d2", "decode")):
        await join(api, name, role)
    opened = [(await api.post("/v1/transfers", json={})).json() for _ in range(3)]
    for transfer in opened:
        del transfer["ticket"]
    opened.sort(key=lambda transfer: transfer["transfer_id"])  # all began at the same time
    assert (await api.get("/v1/transfers")).json() == {"transfers": opened}
    assert (await api.get("/v1/transfers?limit=2")).json() == {"transfers": opened[:2]}
    assert (await api.get("/v1/transfers?instance_id=p")).json() == {"transfers": opened}
    of_d2 = [t for t in opened if t["decode"]["instance_id"] == "d2"]
    assert 0 < len(of_d2) < 3
    assert (await api.get("/v1/transfers?instance_id=d2")).json() == {"transfers": of_d2}
    assert (await api.get("/v1/transfers?instance_id=x")).json() == {"transfers": []}


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "instance_id=a/b"])
async def test_invalid_query_of_a_list_is_refused(api, query):
    problem(await api.get(f"/v1/transfers?{query}"), 422, "invalid-argument")


WHOLE = {"prompt_tokens": 1024}


@pytest.fixture
async def full(api):
    """A transfer that fills the only pair."""
    await join(api, "p")
    await join(api, "d", "decode")
    return (await api.post("/v1/transfers", json=WHOLE)).json()


async def waiting_at(api, app, **members):
    """Starts a request and returns its task once the control plane keeps it waiting."""
    there = app.state.control_plane.admission.waiting["other"]
    body = {**WHOLE, "wait_seconds": 20, **members}
    task = asyncio.create_task(api.post("/v1/transfers", json=body))
    await eventually(lambda: app.state.control_plane.admission.waiting["other"] == there + 1)
    return task


async def test_waiting_request_gets_the_pair_that_is_given_back(api, app, full):
    waiting = await waiting_at(api, app, tenant="acme", priority=2)
    metrics = (await api.get("/metrics")).text
    assert 'kvxfer_transfers_waiting{tenant="other"} 1.0' in metrics
    await api.delete(f"/v1/transfers/{full['transfer_id']}")
    answer = await waiting
    assert answer.status_code == 201
    assert answer.json()["prefill"]["instance_id"] == "p"
    assert answer.json()["ticket"]


async def test_caller_that_leaves_gives_up_its_place(api, app, full):
    (await waiting_at(api, app)).cancel()
    await eventually(lambda: app.state.control_plane.admission.waiting["other"] == 0)
    await api.delete(f"/v1/transfers/{full['transfer_id']}")
    assert (await api.get("/v1/transfers")).json() == {"transfers": []}


async def test_control_plane_that_stops_ends_the_waits(api, app, full):
    waiting = await waiting_at(api, app)
    app.state.stopping.set()
    problem(await waiting, 503, "control-plane-unavailable")


async def test_wait_that_ends_without_a_pair_says_why_and_when_to_retry(api, full):
    answer = await api.post("/v1/transfers", json={**WHOLE, "wait_seconds": 0.1})
    body = problem(answer, 503, "no-capacity")
    assert "within the 0.1 s that the request waits" in body["detail"]
    assert body["reasons"][0] == "no prefill instance has the 64 KV blocks free (most: 'p' with 0)"
    assert answer.headers["retry-after"] == "1"


async def test_request_that_does_not_wait_does_not_overtake_waiting_ones(api, app, full):
    await waiting_at(api, app)
    answer = await api.post("/v1/transfers", json={"prompt_tokens": 16})
    problem(answer, 503, "no-capacity")
    assert answer.headers["retry-after"] == "60", "none was served yet"


@pytest.mark.parametrize(
    "members",
    [{"wait_seconds": 61}, {"wait_seconds": -1}, {"priority": 1001}, {"tenant": "x" * 257}],
)
async def test_waits_out_of_bounds_are_refused(api, members):
    body = problem(await api.post("/v1/transfers", json=members), 422, "invalid-argument")
    assert next(iter(members)) in str(body)


async def test_a_named_transfer_is_answered_again_with_the_same_ticket(api):
    await join(api, "p")
    await join(api, "d", "decode")
    body = {"transfer_id": "t-1", "request_id": "r", "prompt_tokens": 40}
    first, again = [await api.post("/v1/transfers", json=body) for _ in range(2)]
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    refused = await api.post("/v1/transfers", json={**body, "request_id": "s"})
    told = problem(refused, 409, "transfer-exists")
    assert told["transfer_id"] == "t-1"
    for name in ("", "a b", "x" * 129, "-a"):
        problem(
            await api.post("/v1/transfers", json={"transfer_id": name}), 422, "invalid-argument"
        )
