"""The API while its registry is unavailable, and workers that come back to a registry that forgot
them: Redis is killed and paused."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient, Registration
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from verify.polling import PATIENCE, eventually
from verify.processes.control_plane import RunningControlPlane, worker
from verify.processes.redis_server import RedisServer

from .conftest import join, problem, registration

pytestmark = pytest.mark.realtime

HEADER = "kvxfer-stale-seconds"


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def control_plane(
    redis: RedisServer, *, lease: float = 60.0, patience: float = 3.0
) -> RunningControlPlane:
    """Returns a control plane that waits `patience` seconds for an answer of Redis."""
    registry = RedisRegistry(redis.url, LeasePolicy(lease), timeout=patience)
    return RunningControlPlane(registry=registry)


@pytest.fixture
async def api(redis) -> AsyncIterator[httpx2.AsyncClient]:
    with control_plane(redis) as server:
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=PATIENCE, trust_env=False
        ) as client:
            yield client


async def is_current(api: httpx2.AsyncClient) -> bool:
    return (await api.get("/readyz")).json() == {"status": "ok"}


async def is_stale(api: httpx2.AsyncClient, seconds: float) -> bool:
    """True if Redis has been silent for `seconds`."""
    return float((await api.get("/v1/instances")).headers.get(HEADER, 0)) >= seconds


async def test_reads_are_marked_stale_and_writes_say_when_to_retry(api, redis):
    lease = await join(api, "p")
    await join(api, "d", "decode")
    opened = (await api.post("/v1/transfers", json={})).json()
    known = (await api.get("/v1/instances")).json()
    assert known["stale_seconds"] is None
    assert HEADER not in (await api.get("/readyz")).headers

    redis.kill()
    listed = await api.get("/v1/instances")
    assert listed.status_code == 200
    assert listed.json()["instances"] == known["instances"]
    assert listed.json()["stale_seconds"] >= 0
    assert float(listed.headers[HEADER]) >= 0
    where = f"/v1/transfers/{opened['transfer_id']}"
    for path in ("/v1/instances/p", "/v1/transfers", where, "/v1/scale/plan", "/metrics"):
        answer = await api.get(path)
        assert answer.status_code == 200
        assert HEADER in answer.headers
    assert (await api.get("/readyz")).json() == {"status": "stale"}
    hands = await api.post("/v1/handshakes", json={"prefill_id": "p", "decode_id": "d"})
    assert hands.status_code == 200
    assert HEADER in hands.headers

    for refused in (
        await api.post("/v1/instances", json=registration("q")),
        await api.put("/v1/instances/p/heartbeat", json={"epoch": lease["epoch"]}),
        await api.delete("/v1/instances/p", params={"epoch": lease["epoch"]}),
        await api.post("/v1/instances/p/drain", json={}),
        await api.post("/v1/instances/p/role", json={"role": "decode"}),
        await api.post("/v1/transfers", json={}),
        await api.delete(where),
    ):
        body = problem(refused, 503, "control-plane-unavailable")
        assert refused.headers["retry-after"] == "1"
        assert f"127.0.0.1:{redis.port}" in body["detail"]

    redis.start()
    await eventually(lambda: is_current(api))
    assert (await api.get("/v1/instances")).json() == {"instances": [], "stale_seconds": None}


async def test_workers_register_again_after_redis_lost_its_data(redis):
    with control_plane(redis, lease=0.6) as server:
        async with ControlPlaneClient(server.url) as client:
            epochs: list[int] = []
            async with Registration(client, worker("p"), on_epoch=epochs.append):
                redis.kill()
                redis.start()

                async def is_back() -> bool:
                    return (await client.instance("p")).epoch == epochs[-1] > epochs[0]

                await eventually(is_back)


async def test_worker_does_not_wait_past_its_heartbeat_and_logs_what_is_unavailable(redis, caplog):
    with control_plane(redis, lease=3.0) as server:
        async with (
            ControlPlaneClient(server.url) as client,
            Registration(client, worker("p")),
        ):
            redis.kill()
            said = f"instance p: the registry in Redis (127.0.0.1:{redis.port}) cannot be used"
            await eventually(lambda: any(line.startswith(said) for line in caplog.messages))


class Noted(httpx2.AsyncHTTPTransport):
    """A TCP transport that notes when each request began, and the status and text of its answer."""

    def __init__(self, answers: list[tuple[float, int, str]]) -> None:
        super().__init__(limits=httpx2.Limits(max_connections=None))
        self.answers = answers

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        began = SYSTEM_CLOCK.monotonic()
        response = await super().handle_async_request(request)
        await response.aread()
        self.answers.append((began, response.status_code, response.text))
        return response


async def test_a_fleet_registers_again_within_one_heartbeat_after_redis_lost_its_data(redis):
    names = [f"w{number:03}" for number in range(200)]
    answers: list[tuple[float, int, str]] = []
    with control_plane(redis, lease=12.0, patience=10.0) as server:
        async with (
            ControlPlaneClient(server.url) as client,
            httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as api,
            contextlib.AsyncExitStack() as fleet,
        ):
            # Workers share clients: a connection pool's cost grows with the square of its size.
            clients = [
                await fleet.enter_async_context(
                    ControlPlaneClient(server.url, transport=Noted(answers))
                )
                for _ in range(20)
            ]
            members = [
                Registration(clients[number % len(clients)], worker(name))
                for number, name in enumerate(names)
            ]
            await asyncio.gather(*(fleet.enter_async_context(each) for each in members))
            before = {each.instance_id: each.epoch for each in members}
            redis.kill()
            await eventually(lambda: any(status == 503 for _, status, _ in answers))
            redis.start()
            await eventually(lambda: is_current(api))
            back = SYSTEM_CLOCK.monotonic()
            await eventually(lambda: all(m.epoch > before[m.instance_id] for m in members), 60)
            told = await client.instances()
            assert [(each.instance_id, each.state) for each in told] == [
                (name, "ready") for name in names
            ]
            assert {i.instance_id: i.epoch for i in told} == {
                m.instance_id: m.epoch for m in members
            }
            # Each worker was refused once, at its first heartbeat, and registered at once.
            said = Counter(status for _, status, _ in answers)
            assert (said[201], said[409]) == (2 * len(names), len(names))
            assert not [text for began, status, text in answers if began > back and status == 503]


async def test_worker_keeps_its_epoch_if_redis_was_only_unavailable(redis):
    with control_plane(redis, lease=2.0) as server:
        async with (
            ControlPlaneClient(server.url) as client,
            httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE, trust_env=False) as api,
        ):
            epochs: list[int] = []
            async with Registration(client, worker("p"), on_epoch=epochs.append):
                before = await client.instance("p")
                redis.freeze()
                await eventually(lambda: is_stale(api, 3))
                redis.resume()

                async def has_beaten() -> bool:
                    return (await client.instance("p")).heartbeat_at > before.heartbeat_at + 2

                await eventually(has_beaten)
                assert (await client.instance("p")).epoch == before.epoch
                assert epochs == [before.epoch]


async def test_control_plane_is_not_ready_until_it_has_reached_redis(redis):
    redis.kill()
    with control_plane(redis) as server:
        async with httpx2.AsyncClient(
            base_url=server.url, timeout=PATIENCE, trust_env=False
        ) as api:
            assert (await api.get("/healthz")).status_code == 200
            for path in ("/readyz", "/v1/instances", "/v1/instances/watch"):
                problem(await api.get(path), 503, "control-plane-unavailable")
            redis.start()
            await eventually(lambda: is_current(api))
            await join(api, "p")
