"""The watch as a browser's EventSource or curl sees it, and its end over a real connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx2
import msgspec
import pytest

from kvxfer.event_stream import EventParser, ServerSentEvent
from kvxfer.instances import Change, Snapshot
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.registry import Registry
from tests.control_plane import pass_time
from verify.polling import PATIENCE, eventually
from verify.processes.control_plane import RunningControlPlane

from .conftest import LEASE, join, problem
from .test_metrics import scrape


@pytest.fixture
def registry(either_registry: Registry) -> Registry:
    return either_registry


class Watch:
    """An open watch, read event by event."""

    def __init__(self, response: httpx2.Response) -> None:
        self.response = response
        self._chunks = response.aiter_bytes()
        self._parser = EventParser()
        self._events: list[ServerSentEvent] = []

    async def next(self) -> tuple[str, int, dict]:
        while not self._events:
            self._events = self._parser.feed(await anext(self._chunks))
        event = self._events.pop(0)
        data = json.loads(event.data)
        assert event.id == str(data["id"])
        schema = {"snapshot": Snapshot, "change": Change}[event.event]
        assert json.loads(msgspec.json.encode(msgspec.convert(data, schema))) == data
        return event.event, data["id"], data


async def test_watch_is_a_snapshot_then_changes(api, registry, clock):
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
        await pass_time(registry, clock, LEASE)
        seen = [await watch.next() for _ in range(4)]
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


async def test_watch_resumes_after_the_last_event_seen(api):
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


async def test_watch_that_cannot_resume_begins_with_a_snapshot(api):
    await join(api, "p")
    headers = {"Last-Event-ID": "7"}
    async with api.stream("GET", "/v1/instances/watch", headers=headers) as response:
        name, _, data = await Watch(response).next()
    assert (name, len(data["instances"])) == ("snapshot", 1)


async def test_last_event_id_that_is_not_a_number_is_refused(api):
    answer = await api.get("/v1/instances/watch", headers={"Last-Event-ID": "x"})
    assert problem(answer, 422, "invalid-argument")["errors"][0]["location"] == "header"


async def test_reader_that_disconnects_is_no_longer_counted(api):
    async with api.stream("GET", "/v1/instances/watch") as response:
        watch = Watch(response)
        await watch.next()
        assert await watchers(api) == 1
    await eventually(lambda: has_no_watchers(api))


async def test_stop_ends_open_watches(app, api):
    async with api.stream("GET", "/v1/instances/watch") as response:
        watch = Watch(response)
        await watch.next()
        app.state.stopping.set()
        with pytest.raises(StopAsyncIteration):
            await watch.next()


async def watchers(api: httpx2.AsyncClient) -> float:
    return (await scrape(api))["kvxfer_watchers", ()]


async def has_no_watchers(api: httpx2.AsyncClient) -> bool:
    return await watchers(api) == 0


# --- as time passes --------------------------------------------------------------------------


only_embedded = pytest.mark.parametrize("either_registry", ["embedded"], indirect=True)


@only_embedded
async def test_watch_reports_an_expired_lease_within_a_sweep_even_if_nobody_calls(api, clock):
    async with api.stream("GET", "/v1/instances/watch") as response:
        watch = Watch(response)
        await watch.next()
        began = clock.monotonic()
        await join(api, "p")
        assert (await watch.next())[2]["cause"] == "registered"
        assert clock.monotonic() == began
        assert (await watch.next())[2]["cause"] == "lease-expired"
        assert LEASE <= clock.monotonic() - began <= LEASE + 0.5


@only_embedded
async def test_idle_watch_is_kept_alive_by_comments(api, clock):
    began, seen = clock.monotonic(), []
    async with api.stream("GET", "/v1/instances/watch") as response:
        async for chunk in response.aiter_bytes():
            seen.append((clock.monotonic() - began, chunk))
            if len(seen) == 5:
                break
    (_, retry), (_, snapshot), *comments = seen
    assert retry == b"retry: 1000\n\n"
    assert snapshot.startswith(b"event: snapshot")
    assert comments == [(seconds, b": keep-alive\n\n") for seconds in (15, 30, 45)]


# --- over a real connection ------------------------------------------------------------------


@pytest.fixture(params=["embedded", "redis"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningControlPlane]:
    registry = None
    if request.param == "redis":
        url = request.getfixturevalue("empty_redis").url
        registry = RedisRegistry(url, LeasePolicy(600), timeout=PATIENCE)
    with RunningControlPlane(lease_seconds=600, registry=registry) as running:
        yield running


@pytest.mark.native
async def test_readers_connection_and_server_end_a_watch(server):
    async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as api:
        async with api.stream("GET", "/v1/instances/watch") as response:
            watch = Watch(response)
            assert (await watch.next())[0] == "snapshot"
            assert await watchers(api) == 1
        await eventually(lambda: has_no_watchers(api))
        async with api.stream("GET", "/v1/instances/watch") as response:
            watch = Watch(response)
            await watch.next()
            await join(api, "p")
            assert (await watch.next())[2]["cause"] == "registered"
            await asyncio.to_thread(server.stop)
            with pytest.raises(StopAsyncIteration):
                await watch.next()
