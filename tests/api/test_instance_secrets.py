"""A worker acts only for its own instance: each call that acts as one, with different secrets."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from fastapi import FastAPI
from msgspec import json

from kvxfer.api.app import create_app
from kvxfer.api.settings import Settings
from kvxfer.client import ControlPlaneClient, Credentials, calls
from kvxfer.instance_secret import HEADER
from kvxfer.instances import BlockUpdate, Load
from kvxfer.web.tokens import Scope, watch_tokens
from kvxfer.weight_updates import AnnounceUpdate, Decision
from tests.asgi import AsgiTransport
from tests.control_plane import calling
from verify.processes.control_plane import CLUSTER_KEY, worker

from .conftest import problem, registration

UPDATE = {"update_id": "u", "model": "llama", "version": 7}


class Send(NamedTuple):
    method: str
    path: str
    body: Any = None
    params: Any = None


def acting(epoch: int) -> dict[str, Send]:
    """Returns the calls that act as instance p, without those of weight updates."""
    return {
        "heartbeat": Send("PUT", "/v1/instances/p/heartbeat", {"epoch": epoch}),
        # FastAPI reads a number from a string.
        "heartbeat by FastAPI": Send("PUT", "/v1/instances/p/heartbeat", {"epoch": str(epoch)}),
        "blocks": Send("POST", "/v1/instances/p/blocks", {"epoch": epoch, "added": []}),
        "drain": Send("POST", "/v1/instances/p/drain", {"deadline_seconds": 1}),
        "deregister": Send("DELETE", "/v1/instances/p", params={"epoch": epoch}),
    }


CALLS = tuple(acting(1))
OPERATORS = ("drain", "deregister")


def bearer(scope: str, secret: str | None = None) -> dict[str, str]:
    headers = {"Authorization": f"Bearer token-of-the-{scope}"}
    return headers if secret is None else {**headers, HEADER: secret}


@pytest.fixture
def app(tmp_path: Path, either_registry, clock) -> FastAPI:
    file = tmp_path / "tokens"
    file.write_text("".join(f"the-{scope} {scope} token-of-the-{scope}\n" for scope in Scope))
    tokens = watch_tokens(file, clock=clock)
    settings = Settings(cluster_key=CLUSTER_KEY, tokens=tokens)
    return create_app(settings, either_registry, clock=clock)


async def join(api: httpx2.AsyncClient, name: str, *, takes_secret: bool = True) -> dict[str, Any]:
    """Registers a worker whose weights may be updated, and returns the answer."""
    body = registration(name) | {"takes_secret": takes_secret, "identity": {"weights_version": 6}}
    answer = await api.post("/v1/instances", json=body, headers=bearer("worker"))
    assert answer.status_code == 201, answer.text
    joined: dict[str, Any] = answer.json()
    return joined


async def send(api: httpx2.AsyncClient, what: Send, headers: dict[str, str]) -> httpx2.Response:
    return await api.request(
        what.method, what.path, json=what.body, params=what.params, headers=headers
    )


async def test_secret_is_sent_once_and_only_to_a_worker_that_takes_one(api):
    taken, none = await join(api, "p"), await join(api, "q", takes_secret=False)
    assert (len(taken["secret"]), none["secret"]) == (64, None)
    beat = acting(taken["epoch"])["heartbeat"]
    answer = await send(api, beat, bearer("worker", taken["secret"]))
    assert "secret" not in answer.json()
    for path in ("/v1/instances", "/v1/instances/p", "/v1/overview", "/metrics"):
        told = await api.get(path, headers=bearer("admin"))
        assert told.status_code == 200
        assert taken["secret"] not in told.text
    told = (await api.get("/v1/instances", headers=bearer("admin"))).json()["instances"]
    assert [each["has_secret"] for each in told] == [True, False]


@pytest.mark.native
@pytest.mark.parametrize("either_registry", ["redis"], indirect=True)
async def test_redis_holds_no_secret(api, empty_redis):
    taken = await join(api, "p")
    with empty_redis.client() as client:
        held = [client.hgetall("kvxfer:instances"), client.xrange("kvxfer:log")]
    assert hashlib.sha256(taken["secret"].encode()).hexdigest() in repr(held)
    assert taken["secret"] not in repr(held)


@pytest.mark.parametrize("call", CALLS)
async def test_another_workers_secret_or_none_is_refused(api, call):
    mine, others = await join(api, "p"), await join(api, "q")
    what = acting(mine["epoch"])[call]
    for secret in (others["secret"], None, "", "é", mine["secret"][:-1], mine["secret"] + "0"):
        headers = {k: v.encode() for k, v in bearer("worker", secret).items()}
        body = problem(await send(api, what, headers), 403, "forbidden")
        assert body["instance_id"] == "p"
        assert "'p'" in body["detail"]
        assert "token of scope admin" in body["detail"]
        assert mine["secret"] not in json.encode(body).decode()
    answer = await send(api, what, bearer("worker", mine["secret"]))
    assert answer.is_success, answer.text


@pytest.mark.parametrize("call", CALLS)
async def test_instance_that_takes_no_secret_needs_none(api, call):
    lease = await join(api, "p", takes_secret=False)
    others = await join(api, "q")
    what = acting(lease["epoch"])[call]
    answer = await send(api, what, bearer("worker", others["secret"]))
    assert answer.is_success, answer.text


@pytest.mark.parametrize("call", OPERATORS)
async def test_operator_needs_no_secret(api, call):
    lease = await join(api, "p")
    answer = await send(api, acting(lease["epoch"])[call], bearer("admin"))
    assert answer.is_success, answer.text


@pytest.mark.parametrize("call", CALLS)
async def test_without_tokens_all_are_operators_but_none_acts_as_another_worker(
    either_registry, clock, call
):
    app = create_app(Settings(cluster_key=CLUSTER_KEY), either_registry, clock=clock)
    async with calling(app) as api:
        mine, others = await join(api, "p"), await join(api, "q")
        what = acting(mine["epoch"])[call]
        if call in OPERATORS:
            assert (await send(api, what, {})).is_success
            return
        for secret in (others["secret"], None):
            headers = {} if secret is None else {HEADER: secret}
            problem(await send(api, what, headers), 403, "forbidden")
        assert (await send(api, what, {HEADER: mine["secret"]})).is_success


# --- weight updates --------------------------------------------------------------------------


async def announce(api: httpx2.AsyncClient, scope: str) -> httpx2.Response:
    return await api.post("/v1/weights/updates", json=UPDATE, headers=bearer(scope))


async def decide(
    api: httpx2.AsyncClient,
    decision: str,
    headers: dict[str, str],
    instance_id: str | None = None,
) -> httpx2.Response:
    params = {} if instance_id is None else {"instance_id": instance_id}
    path, body = "/v1/weights/updates/u/decision", {"decision": decision}
    return await api.post(path, json=body, params=params, headers=headers)


async def report(api: httpx2.AsyncClient, scope: str) -> httpx2.Response:
    return await api.patch("/v1/weights/updates/u", json={"bytes": 1}, headers=bearer(scope))


@pytest.mark.parametrize("scope", ["trainer", "admin"])
async def test_training_job_leads_an_update(api, scope):
    await join(api, "p")
    assert (await announce(api, scope)).status_code == 201
    assert (await report(api, scope)).status_code == 200
    assert (await decide(api, "commit", bearer(scope))).json()["decision"] == "commit"


async def test_worker_leads_no_update(api):
    mine = await join(api, "p")
    body = problem(await announce(api, "worker"), 403, "forbidden")
    assert "takes a token with scope trainer; give one to the training job" in body["detail"]
    await announce(api, "trainer")
    problem(await report(api, "worker"), 403, "forbidden")
    for instance_id in ("p", None):
        headers = bearer("worker", mine["secret"])
        problem(await decide(api, "commit", headers, instance_id), 403, "forbidden")
    update = (await api.get("/v1/weights/updates/u", headers=bearer("worker"))).json()
    assert (update["state"], update["bytes"]) == ("staging", None)


async def test_member_asks_for_abort_with_its_secret(api):
    mine = await join(api, "p")
    await announce(api, "trainer")
    others = await join(api, "q")  # takes no part
    for secret, instance_id in (
        (others["secret"], "p"),
        (None, "p"),
        (others["secret"], "q"),
        (mine["secret"], "q"),
        (mine["secret"], None),
        (None, None),
    ):
        answer = await decide(api, "abort", bearer("worker", secret), instance_id)
        problem(answer, 403, "forbidden")
    answer = await decide(api, "abort", bearer("worker", mine["secret"]), "p")
    assert (answer.status_code, answer.json()["decision"]) == (200, "abort")


async def test_workers_and_training_jobs_without_secrets_still_work(api):
    """Such a fleet uses one token, of scope worker, and no secret."""
    await join(api, "p")
    await join(api, "q", takes_secret=False)
    assert (await announce(api, "worker")).status_code == 201
    assert (await report(api, "worker")).status_code == 200
    assert (await decide(api, "abort", bearer("worker"))).json()["decision"] == "abort"


# --- the client ------------------------------------------------------------------------------


async def test_client_sends_the_secret_that_it_is_given(app):
    def client(scope: str) -> ControlPlaneClient:
        credentials = Credentials(token=f"token-of-the-{scope}")
        transport = AsgiTransport({"kvxfer": app})
        return ControlPlaneClient("http://kvxfer", credentials=credentials, transport=transport)

    async with calling(app), client("worker") as me, client("trainer") as trainer:
        lease = await me.register(worker("p"), takes_secret=True)
        assert lease.secret is not None
        assert lease.secret not in repr(calls.heartbeat("p", lease.epoch, secret=lease.secret))
        shown = {"secret": lease.secret}
        await me.heartbeat("p", lease.epoch, load=Load(running=1), **shown)
        await me.publish_blocks("p", lease.epoch, BlockUpdate(added=(1,)), **shown)
        await trainer.announce_weight_update(AnnounceUpdate(**UPDATE))
        decided = await me.decide_weight_update("u", Decision.ABORT, instance_id="p", **shown)
        assert decided.decision is Decision.ABORT
        await me.drain("p", **shown)
        await me.deregister("p", lease.epoch, **shown)
