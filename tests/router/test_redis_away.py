"""A cluster of real processes while Redis is unavailable: what goes on, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient
from kvxfer.instances import Snapshot
from kvxfer.reference.runner import ModelRunner
from kvxfer.router.asked import read_request
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.dialects import COMPLETIONS
from kvxfer.router.exchange import Exchange
from kvxfer.router.settings import RouterSettings
from kvxfer.transfers import OpenedTransfer
from tests.api.conftest import problem, registration
from verify.polling import eventually
from verify.processes.redis_server import RedisServer

from .cluster import Cluster, until
from .completions import MODEL, asked, streamed

pytestmark = pytest.mark.realtime

LEASE: Final = 6.0
STALL: Final = 2.0
STALE: Final = "Kvxfer-Stale-Seconds"
WORKERS: Final = ("prefill-0", "decode-0")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def cluster(model: Path, redis: RedisServer) -> Iterator[Cluster]:
    with Cluster(model, "--registry", redis.url, "--lease-seconds", str(LEASE)) as cluster:
        cluster.start_workers(*WORKERS)
        yield cluster


@pytest.mark.parametrize("how", ["paused", "stopped"])
async def test_a_cluster_outlives_a_redis_that_comes_back_with_its_data(
    cluster: Cluster, redis: RedisServer, single: ModelRunner, how: str
) -> None:
    async with (
        httpx2.AsyncClient(base_url=cluster.url, timeout=None) as api,
        httpx2.AsyncClient(base_url=cluster.router.url, timeout=None) as router,
        ControlPlaneClient(cluster.url) as client,
        aclosing(client.watch()) as watch,
    ):
        known = await anext(watch)
        assert isinstance(known, Snapshot)
        epochs = {each.instance_id: each.epoch for each in known.instances}
        assert set(epochs) == set(WORKERS)
        change = asyncio.ensure_future(anext(watch))
        ticket = await client.open_transfer(model=MODEL, prompt_tokens=40)

        async with streamed(router, asked("before and after", 1500)) as events:
            tokens = (await anext(events))["choices"][0]["token_ids"]
            # The router releases the stream's reservation now; later it could not.
            await until(lambda: len(cluster.transfers()) == 1)
            began = time.monotonic()
            await asyncio.to_thread(redis.freeze if how == "paused" else redis.stop)
            assert not await asyncio.to_thread(cluster.idle)
            tokens += [t async for e in events if e for t in e["choices"][0]["token_ids"]]
        assert tokens == single.generate("before and after", 1500, ignore_eos=True)

        await reads_tell_what_was_known(api, epochs, ticket)
        noticed = time.monotonic()
        await writes_are_refused(api, epochs, ticket)
        said = await router.post("/v1/completions", json=asked("too late"))
        assert (said.status_code, said.headers["retry-after"]) == (503, "1")
        assert said.json()["error"]["code"] == "control-plane-unavailable"
        assert await moved_by(ticket, "carried on") == single.generate(
            "carried on", 24, ignore_eos=True
        )

        async def outlasts_every_lease() -> bool:
            await reads_tell_what_was_known(api, epochs, ticket)
            least = time.monotonic() - noticed
            stale: float = (await api.get("/v1/instances")).json()["stale_seconds"]
            assert least - 1 < stale < time.monotonic() - began + 1 + STALL
            return stale > 2 * LEASE

        await eventually(outlasts_every_lease, 60, pause=0.5)
        assert not change.done()

        back = time.time()
        await asyncio.to_thread(redis.resume if how == "paused" else redis.start)
        answer = await eventually(lambda: current(api))
        assert {each["instance_id"]: each["epoch"] for each in answer} == epochs

        async def all_were_heard() -> bool:
            found = (await api.get("/v1/instances")).json()["instances"]
            assert {each["instance_id"]: each["epoch"] for each in found} == epochs
            return all(each["heartbeat_at"] > back for each in found)

        await eventually(all_were_heard)
        await client.release_transfer(ticket.transfer_id)

        said = await router.post("/v1/completions", json=asked("as ever"))
        assert said.json()["choices"][0]["token_ids"] == single.generate(
            "as ever", 24, ignore_eos=True
        )
        await until(cluster.idle)
        assert not change.done(), "a worker lost its place"
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)


async def reads_tell_what_was_known(
    api: httpx2.AsyncClient, epochs: dict[str, int], ticket: OpenedTransfer
) -> None:
    listed = await api.get("/v1/instances")
    assert listed.status_code == 200
    assert {each["instance_id"]: each["epoch"] for each in listed.json()["instances"]} == epochs
    assert listed.json()["stale_seconds"] >= 0
    for path in ("/v1/instances/decode-0", f"/v1/transfers/{ticket.transfer_id}", "/metrics"):
        answer = await api.get(path)
        assert answer.status_code == 200
        assert float(answer.headers[STALE]) >= 0
    assert (await api.get("/readyz")).json() == {"status": "stale"}


async def writes_are_refused(
    api: httpx2.AsyncClient, epochs: dict[str, int], ticket: OpenedTransfer
) -> None:
    for refused in (
        await api.post("/v1/instances", json=registration("another")),
        await api.put("/v1/instances/decode-0/heartbeat", json={"epoch": epochs["decode-0"]}),
        await api.post("/v1/instances/decode-0/drain", json={}),
        await api.post("/v1/transfers", json={}),
        await api.delete(f"/v1/transfers/{ticket.transfer_id}"),
    ):
        problem(refused, 503, "control-plane-unavailable")
        assert refused.headers["retry-after"] == "1"


async def moved_by(ticket: OpenedTransfer, prompt: str) -> list[int]:
    """Sends both workers a request with an earlier ticket; returns decode's tokens."""
    content = json.dumps(asked(prompt)).encode()
    request = read_request(COMPLETIONS, content, request_id=ticket.request_id)
    async with (
        contextlib.aclosing(WorkerConnections()) as http,
        Exchange(http, ticket, request, RouterSettings()) as both,
    ):
        await both.begin(seconds=60)
        _, decoded = await both.answers()
    tokens: list[int] = json.loads(decoded)["choices"][0]["token_ids"]
    return tokens


async def current(api: httpx2.AsyncClient) -> list[dict[str, Any]]:
    answer = (await api.get("/v1/instances")).json()
    found: list[dict[str, Any]] = [] if answer["stale_seconds"] is not None else answer["instances"]
    return found
