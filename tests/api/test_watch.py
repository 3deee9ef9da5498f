"""The watch over a real connection: what a browser's EventSource or curl would see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from kvxfer.api.schemas.instances import Change, Snapshot
from kvxfer.event_stream import EventParser, ServerSentEvent
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.registry import LeasePolicy
from tests.control_plane import RunningControlPlane
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE

from .conftest import LEASE, join, problem


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture(params=["embedded", "redis"])
def server(request, clock):
    registry = None
    if request.param == "redis":
        url = request.getfixturevalue("empty_redis").url
        registry = RedisRegistry(url, LeasePolicy(LEASE), clock=clock, timeout=PATIENCE)
    with RunningControlPlane(lease_seconds=LEASE, clock=clock, registry=registry) as running:
        yield running


@pytest.fixture
async def api(server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
        yield client


class Watch:
    """An open watch: its events one by one."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self._chunks = response.aiter_bytes()
        self._parser = EventParser()
        self._events: list[ServerSentEvent] = []

    async def next(self) -> tuple[str, int, dict]:
        while not self._events:
            self._events = self._parser.feed(await asyncio.wait_for(anext(self._chunks), PATIENCE))
        event = self._events.pop(0)
        data = json.loads(event.data)
        assert event.id == str(data["id"])
        schema = {"snapshot": Snapshot, "change": Change}[event.event]
        assert json.loads(schema.model_validate(data).model_dump_json()) == data
        return event.event, data["id"], data


async def test_watch_is_a_snapshot_then_changes(api, clock):
    lease = await join(api, "p")
    async with api.stream("GET", "/v1/instances/watch") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        watch = Watch(response)
        name, start, snapshot = await watch.next()
        assert name == "snapshot"
        assert snapshot["instances"] == (await api.get("/v1/instances")).json()["instances"]

        await join(api, "d", "decode", state="joining")
        beat = {"epoch": lease["epoch"], "state": "draining"}
        await api.put("/v1/instances/p/heartbeat", json=beat)
        await api.delete("/v1/instances/p", params={"epoch": lease["epoch"]})
        seen = [await watch.next() for _ in range(3)]
        ended = asyncio.ensure_future(watch.next())
        while not ended.done():  # nobody says anything of `d`: the server itself notices
            clock.advance(LEASE / 12)
            await api.get("/readyz")
        seen.append(await ended)
        assert [
            (n, c["cause"], c["instance"]["instance_id"], c["instance"]["state"])
            for n, _, c in seen
        ] == [
            ("change", "registered", "d", "joining"),
            ("change", "state-changed", "p", "draining"),
            ("change", "deregistered", "p", "gone"),
            ("change", "lease-expired", "d", "gone"),
        ]
        ids = [start, *(event_id for _, event_id, _ in seen)]
        assert ids == sorted(set(ids))


async def test_watch_goes_on_after_the_last_event_seen(api):
    await join(api, "p1")
    async with api.stream("GET", "/v1/instances/watch") as response:
        _, seen, _ = await Watch(response).next()
    await join(api, "p2")
    await join(api, "p3")
    headers = {"Last-Event-ID": str(seen)}
    async with api.stream("GET", "/v1/instances/watch", headers=headers) as response:
        watch = Watch(response)
        names = [(await watch.next())[2]["instance"]["instance_id"] for _ in range(2)]
    assert names == ["p2", "p3"]


async def test_watch_that_cannot_go_on_begins_with_a_snapshot(api):
    await join(api, "p")
    headers = {"Last-Event-ID": "7"}
    async with api.stream("GET", "/v1/instances/watch", headers=headers) as response:
        name, _, data = await Watch(response).next()
    assert (name, len(data["instances"])) == ("snapshot", 1)


async def test_last_event_id_that_is_no_number_is_refused(api):
    answer = await api.get("/v1/instances/watch", headers={"Last-Event-ID": "x"})
    assert problem(answer, 422, "invalid-argument")["errors"][0]["location"] == "header"


async def test_idle_watch_is_kept_alive_by_comments():
    with RunningControlPlane(keepalive_seconds=0.01) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, trust_env=False) as api,
            api.stream("GET", "/v1/instances/watch") as response,
        ):
            text = b""
            async for chunk in response.aiter_bytes():
                text += chunk
                if text.count(b": keep-alive\n\n") == 3:
                    break
    assert text.startswith(b"retry: 1000\n\n")


async def test_reader_that_goes_away_is_no_watcher_any_more(api):
    async def watchers() -> str:
        text = (await api.get("/metrics")).text
        return next(line for line in text.splitlines() if line.startswith("kvxfer_watchers "))

    async with api.stream("GET", "/v1/instances/watch") as response:
        watch = Watch(response)
        await watch.next()
        assert await watchers() == "kvxfer_watchers 1.0"
    async with asyncio.timeout(PATIENCE):
        while await watchers() != "kvxfer_watchers 0.0":
            pass


async def test_stop_ends_open_watches(server, api):
    async with api.stream("GET", "/v1/instances/watch") as response:
        watch = Watch(response)
        await watch.next()
        await asyncio.to_thread(server.stop)
        with pytest.raises(StopAsyncIteration):
            await watch.next()
