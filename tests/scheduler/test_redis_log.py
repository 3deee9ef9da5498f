"""The log in Redis: what it holds of each step, and its bound."""

from __future__ import annotations

import pytest

from kvxfer.instances import BlockUpdate, InstanceState, Load, Role, Traffic
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from verify.polling import PATIENCE
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import replica

pytestmark = pytest.mark.native

READY = InstanceState.READY
SENT = tuple(
    Traffic(to=f"kvxfer-decode-7d9f8b6c5d-{n:05}", fabric="verbs", bytes_per_second=1e9 / (n + 1))
    for n in range(64)
)


def log_bytes(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.memory_usage("kvxfer:log", samples=0) or 0)


async def test_no_record_of_the_log_has_the_traffic_of_an_instance(empty_redis):
    async with replica(empty_redis) as registry:
        lease = await registry.register(worker("p"), state=READY)
        before, beats = log_bytes(empty_redis), 500
        load = Load(running=3, waiting=1, free_blocks=1000, requests_per_second=3.2, sent=SENT)
        for _ in range(beats):
            await registry.heartbeat("p", lease.epoch, load=load)
        assert (log_bytes(empty_redis) - before) / beats <= 400


async def test_traffic_of_an_instance_is_read_at_every_replica_until_it_leaves(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        leases = {
            name: await one.register(worker(name), state=READY)
            for name in (f"p{n:03}" for n in range(300))
        }
        for name, lease in leases.items():
            await one.heartbeat(name, lease.epoch, load=Load(running=1, sent=SENT[:2]))
        assert await other.sent() == dict.fromkeys(leases, SENT[:2])
        assert all(each.load == Load(running=1) for each in await other.instances())
        await one.heartbeat("p000", leases["p000"].epoch, load=Load())
        await one.heartbeat("p001", leases["p001"].epoch)
        await one.deregister("p002", leases["p002"].epoch)
        assert await other.sent() == dict.fromkeys(leases.keys() - {"p000", "p002"}, SENT[:2])


@pytest.mark.parametrize("record", ["small", "large"])
async def test_the_log_stays_below_its_limit_with_small_and_large_records(empty_redis, record):
    limit = 1 << 18
    registry = RedisRegistry(
        empty_redis.url,
        LeasePolicy(60),
        timeout=PATIENCE,
        keyspace=Keyspace(registry_log_bytes=limit),
    )
    await registry.open()
    lease = await registry.register(worker("p"), state=READY)
    hashes = 1 if record == "small" else 512
    most = 0
    for begin in range(0, 200 if hashes > 1 else 4_000, 10):
        for n in range(begin, begin + 10):
            update = BlockUpdate(added=tuple(range(n, n + hashes)), reset=True)
            await registry.publish_blocks("p", lease.epoch, update)
        most = max(most, log_bytes(empty_redis))
    assert limit / 4 < most <= limit
    await registry.register(worker("d", Role.DECODE), state=READY)
    assert len(await registry.instances()) == 2
    await registry.close()
