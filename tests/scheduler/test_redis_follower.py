"""A mirror that is behind: steps continue, and only what is missing is loaded again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvxfer.clock import SystemClock
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.redis_registry.follower import Follower
from kvxfer.scheduler.redis_registry.snapshot import Turns
from kvxfer.scheduler.sent_prompts import SentPrompts
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from verify.polling import PATIENCE, eventually
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import is_current, replica

pytestmark = pytest.mark.native

READY = InstanceState.READY


class Held:
    """A method of every Follower that waits until `free` is set, with a count of its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.calls = 0
        self.free = asyncio.Event()
        self.free.set()
        original = getattr(Follower, method)

        async def held(follower: Follower) -> None:
            self.calls += 1
            await self.free.wait()
            await original(follower)

        monkeypatch.setattr(Follower, method, held)


async def every_step(registry: RedisRegistry, name: str) -> None:
    lease = await registry.register(worker(name), state=READY)
    await registry.heartbeat(name, lease.epoch)
    await registry.publish_blocks(name, lease.epoch, BlockUpdate(added=(1,)))
    await registry.drain(name, seconds=5)
    await registry.change_role(name, Role.BOTH)
    await registry.sweep()
    await registry.deregister(name, lease.epoch)


async def test_every_step_is_taken_while_the_fleet_is_loaded(empty_redis, monkeypatch):
    loads = Held(monkeypatch, "_load")
    loads.free.clear()
    registry = RedisRegistry(empty_redis.url, LeasePolicy(60), timeout=PATIENCE)
    opening = asyncio.create_task(registry.open())
    await eventually(lambda: loads.calls == 1)
    await eventually(lambda: registry._link.trouble is None)
    await every_step(registry, "p")
    with pytest.raises(ControlPlaneUnavailable, match="not connected yet"):
        await registry.instances()
    loads.free.set()
    await opening
    assert await registry.instances() == ()
    await registry.close()


async def test_every_step_is_taken_while_the_mirror_is_behind_and_reads_are_stale(
    empty_redis, monkeypatch
):
    reads = Held(monkeypatch, "_read")
    async with replica(empty_redis, timeout=1) as registry:
        await registry.register(worker("p"), state=READY)
        await registry.register(worker("d", Role.DECODE), state=READY)
        known = await registry.instances()
        reads.free.clear()
        await registry.sweep()
        await eventually(lambda: len(registry._mirror.fleet.snapshot()) == 2)
        for name in ("q", "r"):  # a read that began earlier may bring the first
            await registry.register(worker(name), state=READY)
            told = await registry.instances()
        assert told[:2] == known
        assert "r" not in {each.instance_id for each in told}
        assert registry.stale_seconds is not None
        opened = await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
        await registry.release(opened.transfer_id)
        await every_step(registry, "s")
        reads.free.set()
        await eventually(lambda: is_current(registry))
        assert [each.instance_id for each in await registry.instances()] == ["d", "p", "q", "r"]


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


async def test_after_a_failed_read_the_log_is_read_from_where_it_was(server, monkeypatch):
    loads = Held(monkeypatch, "_load")
    async with replica(server) as registry:
        for number in range(5):
            name = f"p{number}"
            await registry.register(worker(name), state=READY)
            with server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
            await eventually(lambda: is_current(registry))
            known = {each.instance_id for each in await registry.instances()}
            assert name in known
    assert loads.calls == 1


async def test_another_history_is_loaded_even_if_nothing_is_written_to_it(server, monkeypatch):
    loads = Held(monkeypatch, "_load")
    async with replica(server) as registry:
        await registry.register(worker("p"), state=READY)
        with server.client() as client:
            last, *_ = (int(i.split(b"-")[0]) for i, _ in client.xrevrange("kvxfer:log", count=1))
            moment = client.pipeline()
            moment.xdel("kvxfer:log", f"{last}-0")
            moment.set("kvxfer:sequence", last - 1)
            moment.hdel("kvxfer:instances", "p")
            moment.execute()
        await eventually(lambda: loads.calls == 2)
        await eventually(lambda: is_current(registry))
        assert await registry.instances() == ()


async def test_cached_blocks_are_read_in_portions_after_the_fleet(server):
    names = [f"p{number:02}" for number in range(45)]
    async with replica(server) as one:
        leases = {name: await one.register(worker(name), state=READY) for name in names}
        await one.register(worker("d", Role.DECODE), state=READY)
        for number, name in enumerate(names):
            update = BlockUpdate(added=(number * 10 + 1, number * 10 + 2))
            await one.publish_blocks(name, leases[name].epoch, update)
        with server.client() as client:
            client.config_resetstat()
        async with replica(server) as late:
            for number, name in enumerate(names):  # while the fleet's blocks are loaded
                update = BlockUpdate(added=(number * 10 + 3,), removed=(number * 10 + 2,))
                await one.publish_blocks(name, leases[name].epoch, update)
            await late.instances()

            async def all_read() -> bool:
                return not late._follower._without_blocks

            await eventually(all_read)
            hashes = [10 * number + n for number in range(45) for n in (1, 2, 3)]
            known, found = (holders_of(each, hashes) for each in (one, late))
            assert set().union(*known.values()) == set(names)
            assert found == known
        with server.client() as client:
            assert client.info("commandstats")["cmdstat_hmget"]["calls"] == len(names) + 1


async def test_blocks_of_an_older_replica_are_ignored_and_it_ignores_new_ones(server):
    async with replica(server) as registry:
        await registry.register(worker("d", Role.DECODE), state=READY)
        lease = await registry.register(worker("p"), state=READY)
        with server.client() as client:
            last = int(client.get("kvxfer:sequence"))
            older = {"kind": "blocks", "instance": "p", "added": b"8 bytes.", "removed": b""}
            moment = client.pipeline()
            moment.xadd("kvxfer:log", {"after": last, **older, "reset": ""}, id=f"{last + 1}-0")
            moment.set("kvxfer:sequence", last + 1)
            moment.hset("kvxfer:blocks", "p", b"8 bytes.")
            moment.execute()
            loads = registry._mirror.fleet
            await registry.publish_blocks("p", lease.epoch, BlockUpdate(added=(1,)))
            assert holders_of(registry, [1]) == {1: {"p"}}
            assert registry._mirror.fleet is loads, "the log was followed"
            ((_, record),) = client.xrevrange("kvxfer:log", count=1)
            assert [record[name] for name in (b"added", b"removed", b"reset")] == [b"", b"", b""]
            await registry.deregister("p", lease.epoch)
            assert client.hlen("kvxfer:blocks") == 0


def holders_of(registry: RedisRegistry, hashes: list[int]) -> dict[int, set[str]]:
    index = registry._mirror.fleet._index._prefixes
    levels = index.levels(hashes, SentPrompts())
    return {hashes[level.depth - 1]: index.holders(level) for level in levels}


async def test_other_tasks_get_turns_by_time_and_not_by_number(monkeypatch):
    turns, given, now = Turns(), 0, 100.0
    monkeypatch.setattr(turns, "_time", lambda: now)
    turns._began = now

    async def other() -> None:
        nonlocal given
        while True:
            given += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for seconds in [0.001] * 10 + [0.1] * 3:
        now += seconds
        await turns.give()
    task.cancel()
    assert given == 2 + 3
