"""`/v1/weights/updates`: a training job announces an update, and instances ask for the decision."""

from __future__ import annotations

import pytest
from fastapi import FastAPI

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.model_identity import ModelIdentity
from tests.control_plane import calling, pass_time
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import join, problem
from .test_metrics import scrape

UPDATES = "/v1/weights/updates"
BODY = {"update_id": "u", "model": "llama", "version": 7}


def serving(version: int) -> ModelIdentity:
    return ModelIdentity(checkpoint="c", weights_version=version)


@pytest.fixture
def app(either_registry, clock) -> FastAPI:
    settings = Settings(cluster_key=CLUSTER_KEY, weight_update_seconds=4)
    return create_app(settings, either_registry, clock=clock)


@pytest.fixture
async def api(app):
    """A client of a control plane with two instances that serve version 6."""
    async with calling(app) as client:
        for name, role in (("p", "prefill"), ("d", "decode")):
            await join(client, name, role, identity=serving(6))
        yield client


async def test_an_update_from_its_announcement_to_its_end(api, clock):
    answer = await api.post(UPDATES, json=BODY)
    assert (answer.status_code, answer.headers["location"]) == (201, f"{UPDATES}/u")
    update = answer.json()
    parts = update.pop("instances")
    assert update == {
        "update_id": "u",
        "model": "llama",
        "version": 7,
        "policy": "drain",
        "state": "staging",
        "decision": None,
        "error": None,
        "bytes": None,
        "started_at": clock.unix(),
        "decided_at": None,
        "ended_at": None,
        "lease_seconds": 4.0,
    }
    assert [(p["instance_id"], p["state"], p["version"]) for p in parts] == [
        ("d", "receiving", 6),
        ("p", "receiving", 6),
    ]
    clock.advance(2)
    staged = {"instance_id": "p", "state": "staged", "digest": "0123456789abcdef"}
    answer = await api.patch(f"{UPDATES}/u", json={"bytes": 99, "instances": [staged]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["instances"][1]["digest"] == "0123456789abcdef"
    answer = await api.post(f"{UPDATES}/u/decision", json={"decision": "commit"})
    assert answer.json() == {"update_id": "u", "version": 7, "decision": "commit"}
    served = [
        {"instance_id": name, "state": "committed", "version": 7, "pause_seconds": 0.2}
        for name in "pd"
    ]
    for _ in range(2):  # a repeated report changes nothing and is not counted
        answer = await api.patch(f"{UPDATES}/u", json={"state": "committed", "instances": served})
    assert answer.json()["state"] == "committed"
    assert (await api.get(f"{UPDATES}/u")).json() == answer.json()
    listed = (await api.get(UPDATES, params={"model": "llama"})).json()
    assert listed == {"updates": [answer.json()], "stale_seconds": None}
    assert (await api.get(UPDATES, params={"model": "x"})).json()["updates"] == []
    now = await scrape(api)
    assert now["kvxfer_weight_updates_total", (("outcome", "committed"),)] == 1
    assert now["kvxfer_weight_updates_total", (("outcome", "aborted"),)] == 0
    assert now["kvxfer_weight_update_staging_seconds_count", ()] == 1
    assert now["kvxfer_weight_update_staging_seconds_sum", ()] == 2
    assert now["kvxfer_weight_update_pause_seconds_count", ()] == 2
    assert now["kvxfer_weight_update_pause_seconds_sum", ()] == pytest.approx(0.4)


async def test_refusals_name_their_reason(api):
    old = problem(await api.post(UPDATES, json={**BODY, "version": 6}), 409, "old-version")
    assert (old["version"], old["served"]) == (6, 6)
    named = {**BODY, "instances": ["x"]}
    unknown = problem(await api.post(UPDATES, json=named), 404, "unknown-instance")
    assert unknown["instance_id"] == "x"
    problem(await api.post(UPDATES, json={**BODY, "model": "x"}), 422, "invalid-argument")
    assert (await api.post(UPDATES, json=BODY)).status_code == 201
    other = {**BODY, "update_id": "v"}
    held = problem(await api.post(UPDATES, json=other), 409, "weight-update-exists")
    assert (held["update_id"], held["version"]) == ("u", 7)
    stranger = {"instances": [{"instance_id": "x"}]}
    problem(await api.patch(f"{UPDATES}/u", json=stranger), 422, "invalid-argument")
    await api.post(f"{UPDATES}/u/decision", json={"decision": "abort"})
    ended = await api.patch(f"{UPDATES}/u", json={"state": "committed"})
    assert problem(ended, 409, "weight-update-decided")["decision"] == "abort"
    for answer in (
        await api.get(f"{UPDATES}/x"),
        await api.patch(f"{UPDATES}/x", json={}),
        await api.post(f"{UPDATES}/x/decision", json={"decision": "abort"}),
    ):
        assert problem(answer, 404, "unknown-weight-update")["update_id"] == "x"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 0}, "version"),
        ({"version": 1 << 63}, "version"),
        ({"policy": "later"}, "policy"),
        ({"update_id": "a b"}, "update_id"),
        ({"instances": ["a b"]}, "instances.0"),
    ],
)
async def test_invalid_announcement_names_the_member(api, change, field):
    answer = await api.post(UPDATES, json={**BODY, **change})
    assert problem(answer, 422, "invalid-argument")["field"] == field


async def test_an_instance_that_lost_its_coordinator_gets_the_decision(api, clock):
    await api.post(UPDATES, json=BODY)
    asked = await api.post(f"{UPDATES}/u/decision", json={"decision": "abort"})
    assert asked.json()["decision"] == "abort"
    late = await api.post(f"{UPDATES}/u/decision", json={"decision": "commit"})
    assert late.json()["decision"] == "abort"
    now = await scrape(api)
    assert now["kvxfer_weight_updates_total", (("outcome", "aborted"),)] == 1
    assert now["kvxfer_weight_update_staging_seconds_count", ()] == 0


async def test_a_silent_coordinator_ends_its_update(api, clock, either_registry):
    await api.post(UPDATES, json=BODY)
    await pass_time(either_registry, clock, 4)
    update = (await api.get(f"{UPDATES}/u")).json()
    assert (update["state"], update["error"]["code"]) == ("aborted", "lease-expired")


async def test_versions_are_seen_in_the_fleet(api):
    await join(api, "e", "decode", identity=serving(7))
    await join(api, "q", "decode")
    await api.post(UPDATES, json={**BODY, "version": 8, "instances": ["p", "d"]})
    now = await scrape(api)
    assert now["kvxfer_fleet_oldest_weights_version", ()] == 6
    assert now["kvxfer_fleet_newest_weights_version", ()] == 7
    told = (await api.get("/v1/overview")).json()
    versions = {i["instance_id"]: i["weights_version"] for i in told["instances"]}
    assert versions == {"d": 6, "e": 7, "p": 6, "q": None}
    (update,) = told["updates"]
    assert (update["update_id"], update["state"], update["instances"]) == ("u", "staging", 2)


async def test_a_transfer_may_demand_a_version(api):
    opened = await api.post("/v1/transfers", json={"weights_version": 6})
    assert opened.status_code == 201, opened.text
    refused = await api.post("/v1/transfers", json={"weights_version": 7})
    assert problem(refused, 503, "no-capacity")["reasons"] == [
        "no instance serves weights version 7; there are 6 (2)"
    ]
