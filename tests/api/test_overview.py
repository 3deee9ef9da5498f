"""`/v1/overview`, its stream, and the scopes that may read them."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import msgspec
import pytest

from kvxfer.api import overview_feed
from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.event_stream import EventParser
from kvxfer.overview import Overview
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.web.tokens import watch_tokens
from tests.control_plane import calling
from tests.virtual_time import passes
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import join, problem

TOKENS = (
    "ops admin token-of-the-admin\nwall monitor token-of-the-wall\nnode worker token-of-the-node\n"
)
SENT = [{"to": "d", "fabric": "verbs", "bytes_per_second": 9.5e9}]


async def test_what_workers_report_is_seen_with_either_registry(
    either_registry, clock, monkeypatch
):
    monkeypatch.setattr(overview_feed, "_PAUSE", 0)
    app = create_app(Settings(cluster_key=CLUSTER_KEY), either_registry, clock=clock)
    async with calling(app) as api:
        lease = await join(api, "p", labels={"zone": "z"})
        await join(api, "d", "decode")
        for load in ({"running": 2, "free_blocks": 60, "sent": SENT}, {"running": 1, "sent": []}):
            body = {"epoch": lease["epoch"], "load": load}
            answer = await api.put("/v1/instances/p/heartbeat", json=body)
            assert answer.status_code == 200, answer.text
            told = (await api.get("/v1/overview")).json()
            assert told["roles"][0]["running"] == load["running"]
            assert json.loads(msgspec.json.encode(msgspec.convert(told, Overview))) == told
            pairs = [{"prefill": "p", "decode": "d", **each} for each in load["sent"]]
            assert told["pairs"] == [{k: v for k, v in x.items() if k != "to"} for x in pairs]
            listed = (await api.get("/v1/instances/p")).json()["load"]
            assert listed["sent"] == []
        opened = await api.post("/v1/transfers", json={"request_id": "r", "prompt_tokens": 40})
        assert opened.status_code == 201
        (transfer,) = (await api.get("/v1/overview", params={"zone": "z"})).json()["transfers"]
        assert (transfer["request_id"], transfer["prefill"], transfer["decode"]) == ("r", "p", "d")


async def test_the_stream_sends_the_whole_overview_once_a_second(api, clock, monkeypatch):
    monkeypatch.setattr(overview_feed, "_PAUSE", 0)
    await join(api, "p")
    seen = []
    async with api.stream("GET", "/v1/overview/watch?role=prefill") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        parser, began = EventParser(), clock.monotonic()
        async for chunk in answer.aiter_bytes():
            for event in parser.feed(chunk):
                assert event.event == "overview"
                overview = msgspec.json.decode(event.data, type=Overview)
                seen.append((clock.monotonic() - began, overview.matching))
                await join(api, f"q{len(seen)}")
            if len(seen) == 3:
                break
    assert seen == [(0, 1), (1, 2), (2, 3)]


async def test_the_stream_ends_when_the_server_stops(api, app):
    async with api.stream("GET", "/v1/overview/watch") as answer:
        chunks = answer.aiter_bytes()
        assert await anext(chunks)
        app.state.stopping.set()
        assert b"".join([chunk async for chunk in chunks]).count(b"event:") == 1


@pytest.mark.parametrize("path", ["/v1/overview", "/v1/overview/watch"])
@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"role": "x"}, "role"),
        ({"state": "gone"}, "state"),
        ({"limit": 201}, "limit"),
        ({"offset": -1}, "offset"),
        ({"instance_id": "a b"}, "instance_id"),
    ],
)
async def test_invalid_query_names_the_parameter(api, path, query, field):
    body = problem(await api.get(path, params=query), 422, "invalid-argument")
    assert body["field"] == field


async def test_without_a_registry_the_overview_is_unavailable(api, registry):
    await registry.close()
    for path in ("/v1/overview", "/v1/overview/watch"):
        problem(await api.get(path), 503, "control-plane-unavailable")


async def test_callers_learn_their_scopes_and_monitors_read_the_overview(
    tmp_path: Path, registry, clock
):
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    settings = Settings(cluster_key=CLUSTER_KEY, tokens=watch_tokens(file, clock=clock))
    async with calling(create_app(settings, registry, clock=clock)) as api:

        async def get(path: str, token: str) -> httpx2.Response:
            return await api.get(path, headers={"Authorization": f"Bearer {token}"})

        for token, name, scopes, status in (
            ("token-of-the-admin", "ops", ["admin"], 200),
            ("token-of-the-wall", "wall", ["monitor"], 200),
            ("token-of-the-node", "node", ["worker"], 403),
        ):
            who = await get("/v1/caller", token)
            assert who.json() == {"name": name, "scopes": scopes}
            assert (await get("/v1/overview", token)).status_code == status
        problem(await get("/v1/caller", "token-of-a-stranger"), 401, "unauthenticated")
        problem(await api.get("/v1/overview/watch"), 401, "unauthenticated")
        assert (await api.get("/")).status_code == 200


async def test_without_tokens_everybody_has_every_scope(api):
    told = (await api.get("/v1/caller")).json()
    scopes = ["admin", "monitor", "router", "trainer", "worker"]
    assert told == {"name": "anonymous", "scopes": scopes}


async def test_decisions_of_the_autoscaler_are_listed_with_their_reasons(clock):
    registry = EmbeddedRegistry(clock=clock)
    policy = ScalingPolicy(interval=3600, prefill=RolePolicy(min=2), decode=RolePolicy(min=3))
    autoscaler = Autoscaler(registry, policy, policy_name="s.yaml", clock=clock)
    app = create_app(
        Settings(cluster_key=CLUSTER_KEY), registry, clock=clock, autoscaler=autoscaler
    )
    async with calling(app) as api:
        await passes(1)
        told = (await api.get("/v1/overview")).json()["scaling"]
    assert (told["policy"], told["backend"], told["leads"]) == ("s.yaml", "none", True)
    assert [(s["role"], s["direction"]) for s in told["now"]] == [
        ("prefill", "up"),
        ("decode", "up"),
    ]
    assert [(s["role"], s["current"], s["wanted"]) for s in told["changes"]] == [
        ("decode", 0, 3),
        ("prefill", 0, 2),
    ]
    assert "min: 2 instead of 0" in told["changes"][1]["because"]
