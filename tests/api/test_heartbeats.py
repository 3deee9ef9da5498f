"""Heartbeats are answered without FastAPI, with the answers that its route would give."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from kvxfer.api.app import create_app
from kvxfer.api.context import ControlPlane
from kvxfer.api.routes import instances
from kvxfer.api.settings import Settings
from kvxfer.instances import Heartbeat, Lease
from kvxfer.web.tokens import Scope, watch_tokens
from tests.control_plane import calling
from verify.polling import eventually
from verify.processes.control_plane import CLUSTER_KEY

from .conftest import join, problem

PATH = "/v1/instances/p/heartbeat"
JSON = {"content-type": "application/json"}


@pytest.fixture
def by_fastapi(monkeypatch) -> list[int]:
    """The epochs of the heartbeats that reached FastAPI's route."""
    seen: list[int] = []
    renew = instances.renew

    async def noted(
        app: ControlPlane, instance_id: str, body: Heartbeat, secret: str | None
    ) -> Lease:
        seen.append(body.epoch)
        return await renew(app, instance_id, body, secret)

    monkeypatch.setattr(instances, "renew", noted)
    return seen


async def beat(api: httpx2.AsyncClient, body: Any, **headers: str) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await api.put(PATH, content=content, headers={**JSON, **headers})


async def test_a_heartbeat_does_not_reach_fastapi(api, by_fastapi):
    lease = await join(api, "p")
    for load in (None, {"running": 3, "free_blocks": 5}):
        answer = await beat(api, {"epoch": lease["epoch"], "state": "ready", "load": load})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert not by_fastapi
    assert (await api.get("/v1/instances/p")).json()["load"]["running"] == 3


async def test_both_ways_give_the_same_answer(api, by_fastapi):
    lease = await join(api, "p")
    quick = await beat(api, {"epoch": lease["epoch"]})
    slow = await beat(api, {"epoch": str(lease["epoch"])})  # FastAPI reads a number from a string
    assert by_fastapi == [lease["epoch"]]
    assert quick.json() == slow.json()
    assert quick.headers.keys() == slow.headers.keys()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"epoch": 0}',
        b'{"epoch": 1.5}',
        b'{"epoch": 9223372036854775808}',
        b'{"epoch": 1, "state": "gone"}',
        b'{"epoch": 1, "load": {"running": -1}}',
        b'{"epoch": 1, "load": {"ttft_p90": NaN}}',
        b'{"epoch": 1, "load": {"ttft_p90": 1e13}}',
        b'{"epoch": 1, "load": {"models": [""]}}',
        b'{"epoch": 1, "load": {"sent": [{"to": "-", "fabric": "tcp", "bytes_per_second": 1}]}}',
        b'{"epoch": "\xff"}',
        b"[" * 5000,
    ],
)
async def test_refused_body_is_described_by_fastapi(api, by_fastapi, body):
    await join(api, "p")
    assert problem(await beat(api, body), 422, "invalid-argument")["detail"]
    assert not by_fastapi


async def test_only_json_is_read(api):
    lease = await join(api, "p")
    text = {"content-type": "text/plain"}
    problem(await beat(api, {"epoch": lease["epoch"]}, **text), 422, "invalid-argument")


@pytest.mark.parametrize("path", ["/v1/instances/-p/heartbeat", "/v1/instances/a+b/heartbeat"])
async def test_invalid_id_is_refused(api, path):
    answer = problem(await api.put(path, json={"epoch": 1}), 422, "invalid-argument")
    assert answer["field"] == "instance_id"


async def test_other_methods_are_told_which_one_the_path_takes(api):
    answer = await api.post(PATH, json={"epoch": 1})
    problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "PUT"


async def test_a_heartbeat_is_counted_timed_and_logged_like_every_request(api, caplog):
    lease = await join(api, "p")
    with caplog.at_level(logging.INFO, logger="kvxfer.api.requests"):
        answer = await beat(api, {"epoch": lease["epoch"]}, **{"X-Request-ID": "mine"})
        await beat(api, {"epoch": lease["epoch"] + 1})
        # The lines come after the answers.
        told = await eventually(lambda: puts if len(puts := _puts(caplog)) == 2 else None)
    assert answer.headers["x-request-id"] == "mine"
    assert told == [(PATH, 200), (PATH, 409)]
    shown = (await api.get("/metrics")).text
    labels = 'method="PUT",route="/v1/instances/{instance_id}/heartbeat"'
    for status in (200, 409):
        assert f'kvxfer_http_requests_total{{{labels},status="{status}"}} 1.0' in shown
    assert "kvxfer_heartbeats_total 1.0" in shown
    assert 'kvxfer_http_errors_total{code="stale-epoch"} 1.0' in shown


def _puts(caplog) -> list[tuple[str, int]]:
    return [(r.path, r.status) for r in caplog.records if getattr(r, "method", "") == "PUT"]


# --- behind tokens -----------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path, registry, clock) -> Iterator[FastAPI]:
    """A control plane that takes five requests a second from each caller, and small bodies."""
    file = tmp_path / "tokens"
    file.write_text("".join(f"the-{scope} {scope} token-of-the-{scope}\n" for scope in Scope))
    tokens = watch_tokens(file, clock=clock)
    settings = Settings(cluster_key=CLUSTER_KEY, tokens=tokens, rate_limit=5, max_body_bytes=2000)
    return create_app(settings, registry, clock=clock)


def bearer(scope: str) -> dict[str, str]:
    return {"Authorization": f"Bearer token-of-the-{scope}"}


async def test_a_fleet_behind_one_address_loses_no_lease_to_the_rate_limit(guarded):
    async with calling(guarded, headers=bearer("worker")) as api:
        lease = await join(api, "p")
        for _ in range(100):
            assert (await beat(api, {"epoch": lease["epoch"]})).status_code == 200
        # Only the registration and these requests count.
        others = [(await api.get("/v1/instances")).status_code for _ in range(5)]
        assert others == [200] * 4 + [429]


async def test_a_stranger_is_refused_before_the_body_is_read(guarded):
    async with calling(guarded) as api:
        problem(await beat(api, b"{"), 401, "unauthenticated")
        problem(await beat(api, b"{", **bearer("router")), 403, "forbidden")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused(guarded, chunked):
    async def chunks():
        for _ in range(10):
            yield b" " * 1000

    async with calling(guarded, headers=bearer("worker")) as api:
        content = chunks() if chunked else b" " * 10_000
        answer = await api.put(PATH, content=content, headers=JSON)
        problem(answer, 413, "body-too-large")
