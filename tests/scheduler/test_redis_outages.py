"""Redis is unavailable, loses its data, or fails over: what the registry in it still promises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from kvxfer.clock import SystemClock
from kvxfer.errors import ControlPlaneUnavailable, StaleEpoch
from kvxfer.instances import Change, InstanceState, Role, Snapshot
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from verify.polling import eventually
from verify.processes.control_plane import worker
from verify.processes.redis_failover import Clustered, Watched
from verify.processes.redis_server import RedisServer, audit

from .redis_replica import is_current, replica

READY = InstanceState.READY


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis that the test may stop."""
    with RedisServer() as running:
        yield running


# --- Redis loses its data --------------------------------------------------------------------


@pytest.mark.realtime
async def test_restart_with_data_lost_is_a_new_fleet_with_greater_epochs(server):
    async with replica(server) as registry:
        before = await registry.register(worker("p"), state=READY)
        watch = registry.watch()
        first = await anext(watch)
        server.kill()
        server.start()
        await eventually(lambda: is_current(registry))
        with pytest.raises(StaleEpoch, match="register again"):
            await registry.heartbeat("p", before.epoch)
        after = await registry.register(worker("p"), state=READY)
        assert after.epoch > before.epoch
        assert [i.epoch for i in await registry.instances()] == [after.epoch]

        snapshot = await anext(watch)
        assert isinstance(snapshot, Snapshot)
        assert snapshot.id > first.id


@pytest.mark.native
async def test_data_that_is_lost_while_redis_stays_up_is_noticed(server):
    async with replica(server) as registry:
        before = await registry.register(worker("p"), state=READY)
        with server.client() as client:
            client.flushall()
        assert await registry.instances() == ()
        assert (await registry.register(worker("p"), state=READY)).epoch > before.epoch
        assert [i.instance_id for i in await registry.instances()] == ["p"]


@pytest.mark.native
async def test_replica_that_missed_records_loads_everything_again(empty_redis):
    async with replica(empty_redis, timeout=3) as registry:
        await registry.register(worker("p"), state=READY)
        with empty_redis.client() as client:
            moment = client.pipeline()
            registered = client.hgetall("kvxfer:instances")[b"p"]
            moment.hset("kvxfer:instances", "q", registered)
            moment.hset("kvxfer:specs", "q", msgspec.json.encode(worker("q")))
            moment.incr("kvxfer:sequence")
            moment.execute()
        await eventually(lambda: is_current(registry))
        assert [i.instance_id for i in await registry.instances()] == ["p", "q"]


# --- Redis is unavailable --------------------------------------------------------------------


@pytest.mark.realtime
@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_while_redis_is_unavailable_reads_return_what_was_known_and_writes_fail(server, how):
    async with replica(server, timeout=1 if how == "paused" else 10) as registry:
        prefill = await registry.register(worker("p"), state=READY)
        await registry.register(worker("d", Role.DECODE), state=READY)
        opened = await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
        known = await registry.instances()
        assert registry.stale_seconds is None

        server.freeze() if how == "paused" else server.kill()
        assert await registry.instances() == known
        assert registry.stale_seconds is not None
        assert await registry.instance("p") == known[1]
        assert await registry.transfer(opened.transfer_id) == opened
        assert (await anext(registry.watch())).instances == known
        assert (await registry.statistics()).open_transfers == 1
        await registry.ping()
        for write in (
            registry.register(worker("q")),
            registry.heartbeat("p", prefill.epoch),
            registry.deregister("p", prefill.epoch),
            registry.release(opened.transfer_id),
            open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock()),
        ):
            with pytest.raises(ControlPlaneUnavailable, match="cannot be used"):
                await write
        assert await registry.instances() == known, "a refused write counts nowhere"

        server.resume() if how == "paused" else server.start()
        await eventually(lambda: is_current(registry))
        expected = () if how == "killed" else known
        assert await registry.instances() == expected


@pytest.mark.realtime
async def test_no_lease_ends_while_none_can_be_renewed(server):
    async with replica(server, lease=2.4, timeout=1) as registry:
        lease = await registry.register(worker("p"), state=READY)
        server.freeze()
        await eventually(lambda: (registry.stale_seconds or 0) > 3.5)
        server.resume()
        await eventually(lambda: is_current(registry))
        assert (await registry.heartbeat("p", lease.epoch)).epoch == lease.epoch


@pytest.mark.native
async def test_lease_ends_by_the_clock_of_redis(server):
    async with replica(server, lease=0.5) as registry:
        start = await anext(registry.watch())
        await registry.register(worker("p"), state=READY)
        watch = registry.watch(start.id)
        causes = []
        for _ in ("registered", "lease-expired"):
            change = asyncio.ensure_future(anext(watch))

            async def is_told(change: asyncio.Future[object] = change) -> bool:
                await registry.sweep()
                return change.done()

            await eventually(is_told)
            assert isinstance(change.result(), Change)
            causes.append(change.result().cause)
        assert causes == ["registered", "lease-expired"]


@pytest.mark.realtime
async def test_registry_waits_for_a_redis_that_starts_later(server):
    server.kill()
    async with replica(server, there=False) as registry:
        for call in (registry.instances(), registry.ping(), registry.register(worker("p"))):
            with pytest.raises(ControlPlaneUnavailable, match=f"127.0.0.1:{server.port}"):
                await call
        server.start()
        await eventually(lambda: is_current(registry))
        await registry.register(worker("p"))


@pytest.mark.native
async def test_scripts_that_redis_forgot_are_sent_again(server):
    async with replica(server) as registry:
        await registry.register(worker("p"))
        with server.client() as client:
            client.script_flush()
        await registry.register(worker("q"))
        assert len(await registry.instances()) == 2


@pytest.mark.native
async def test_redis_without_free_memory_is_an_outage_not_a_defect(server):
    async with replica(server) as registry:
        lease = await registry.register(worker("p"))
        with server.client() as client:
            client.config_set("maxmemory", 1)
        with pytest.raises(ControlPlaneUnavailable, match="maxmemory"):
            await registry.heartbeat("p", lease.epoch)
        with server.client() as client:
            client.config_set("maxmemory", 0)
        await eventually(lambda: is_current(registry))
        await registry.heartbeat("p", lease.epoch)


@pytest.mark.native
async def test_closed_registry_says_that_it_is_stopping(empty_redis):
    async with replica(empty_redis) as registry:
        await registry.close()
        for call in (registry.instances(), registry.sweep(), registry.statistics()):
            with pytest.raises(ControlPlaneUnavailable, match="stopping"):
                await call


# --- fail-over -------------------------------------------------------------------------------


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("kind", "prefix"), [(Watched, "kvxfer"), (Clustered, "{kvxfer}")], ids=["sentinel", "cluster"]
)
async def test_the_registry_moves_to_the_standby_of_a_master_that_died(kind, prefix):
    with kind() as servers:
        async with replica(servers.url, prefix=prefix) as registry:
            lease = await registry.register(worker("p"), state=READY)
            await registry.register(worker("d", Role.DECODE), state=READY)
            await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
            known = await registry.instances()
            with servers.master.client() as client:
                assert client.wait(1, 15_000) == 1
            servers.master.kill()

            assert await registry.instances() == known
            await eventually(lambda: registry.heartbeat("p", lease.epoch))
            later = await registry.register(worker("q"), state=READY)
            assert later.epoch > max(i.epoch for i in known)
            assert [i.instance_id for i in await registry.instances()] == ["d", "p", "q"]
            assert (await registry.instance("p")).epoch == lease.epoch
        with servers.standby.client() as client:
            assert client.info("replication")["role"] == "master"
        assert audit(servers.standby, prefix) == {"p": 1, "d": 1}


@pytest.mark.realtime
async def test_the_registry_follows_its_keys_to_another_node_of_a_cluster():
    with Clustered() as servers:
        async with (
            replica(servers.url, prefix="{kvxfer}") as one,
            replica(servers.url, prefix="{kvxfer}") as other,
        ):
            lease = await one.register(worker("p"), state=READY)
            target = await asyncio.to_thread(servers.move_slot)
            await eventually(lambda: one.heartbeat("p", lease.epoch))
            await eventually(lambda: other.register(worker("d", Role.DECODE), state=READY))
            for registry in (one, other):
                await eventually(lambda registry=registry: is_current(registry))
                assert [i.instance_id for i in await registry.instances()] == ["d", "p"]
        assert audit(target, "{kvxfer}") == {}
