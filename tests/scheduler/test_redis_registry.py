"""What the registry in Redis promises beyond the conformance suite: replicas, and losing Redis."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from kvxfer.errors import ControlPlaneUnavailable, KvxferError, NoCapacity, StaleEpoch
from kvxfer.instances import Change, InstanceState, Load, Role, Snapshot
from kvxfer.scheduler.clock import SystemClock
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.registry import LeasePolicy
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from tests.control_plane import FakeClock, eventually, worker
from tests.redis_server import RedisServer, audit, wait_for_replica

READY = InstanceState.READY


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One that the test may stop."""
    with RedisServer() as running:
        yield running


@asynccontextmanager
async def replica(
    server: RedisServer | str,
    *,
    lease: float = 60.0,
    clock: FakeClock | None = None,
    timeout: float = 10.0,
    there: bool = True,
) -> AsyncIterator[RedisRegistry]:
    """With a short timeout only where Redis is to be missed: a busy machine takes its time."""
    url = server if isinstance(server, str) else server.url
    registry = RedisRegistry(url, LeasePolicy(lease), clock=clock, timeout=timeout)
    await registry.open()
    try:
        if there:
            await eventually(lambda: is_current(registry))
        yield registry
    finally:
        await registry.close()


async def is_current(registry: RedisRegistry) -> bool:
    await registry.instances()
    return registry.stale_seconds is None


# --- several replicas ------------------------------------------------------------------------


async def test_what_one_replica_did_every_other_sees_in_its_next_answer(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        for number in range(50):
            name = f"p-{number}"
            lease = await one.register(worker(name), state=READY)
            assert (await other.instance(name)).epoch == lease.epoch
            await other.heartbeat(name, lease.epoch, load=Load(running=number))
            assert (await one.instance(name)).load.running == number
        assert await one.instances() == await other.instances()


async def test_two_routers_at_two_replicas_cannot_overbook_a_worker(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        await one.register(worker("p", num_blocks=10_000), state=READY)
        await one.register(worker("d1", Role.DECODE, num_blocks=10), state=READY)
        await one.register(worker("d2", Role.DECODE, num_blocks=10), state=READY)

        async def ask(registry: RedisRegistry) -> str | None:
            request = TransferRequest(prompt_tokens=3 * 16)
            with suppress(NoCapacity):
                transfer = await open_transfer(registry, request, seconds=60, clock=SystemClock())
                return transfer.decode.instance_id
            return None

        answers = await asyncio.gather(*(ask(r) for r in (one, other) for _ in range(10)))
        assert Counter(answers) == {"d1": 3, "d2": 3, None: 14}
        assert audit(empty_redis) == {"p": 6, "d1": 3, "d2": 3}
        for registry in (one, other):
            assert (await registry.instance("p")).reserved.transfers == 6


async def test_reservation_of_a_replica_that_died_comes_back_at_its_time(empty_redis):
    clock = FakeClock()
    async with replica(empty_redis, clock=clock) as one:
        async with replica(empty_redis, clock=clock) as dying:
            await dying.register(worker("p"), state=READY)
            await dying.register(worker("d", Role.DECODE), state=READY)
            opened = await open_transfer(
                dying, TransferRequest(prompt_tokens=16), seconds=3, clock=clock
            )
        assert await one.transfer(opened.transfer_id) == opened
        assert (await one.instance("d")).reserved.blocks == 1
        clock.advance(3)
        assert (await one.instance("d")).reserved.blocks == 0
        assert audit(empty_redis) == {}


async def test_reservation_that_is_asked_for_twice_counts_once(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        await one.register(worker("p"), state=READY)
        await one.register(worker("d", Role.DECODE), state=READY)
        opened = await open_transfer(one, TransferRequest(), seconds=60, clock=SystemClock())
        await other.reserve(opened, seconds=60)
        assert (await other.instance("d")).reserved.transfers == 1
        assert audit(empty_redis) == {"p": 1, "d": 1}


async def test_choices_under_way_already_count_for_the_next_one(empty_redis):
    async with replica(empty_redis) as registry:
        await registry.register(worker("p"), state=READY)
        for number in range(4):
            await registry.register(worker(f"d{number}", Role.DECODE), state=READY)
        await registry.instances()
        opened = await asyncio.gather(
            *(
                open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
                for _ in range(12)
            )
        )
        assert Counter(t.decode.instance_id for t in opened) == dict.fromkeys(
            ("d0", "d1", "d2", "d3"), 3
        )


async def test_watch_goes_on_at_another_replica_also_at_one_that_starts_later(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        start = await anext(one.watch())
        for name in ("a", "b", "c"):
            await one.register(worker(name))
        async with replica(empty_redis) as late:
            for registry in (other, late):
                watch = registry.watch(start.id)
                changes = [await asyncio.wait_for(anext(watch), 5) for _ in range(3)]
                assert [change.instance.instance_id for change in changes] == ["a", "b", "c"]
                watch = registry.watch(changes[1].id)
                assert await asyncio.wait_for(anext(watch), 5) == changes[2]


@pytest.mark.parametrize("seed", [random.randrange(2**32)])
async def test_replicas_agree_with_each_other_and_with_redis_after_any_history(empty_redis, seed):
    source = random.Random(seed)
    clock = FakeClock()
    names = [f"w-{n}" for n in range(6)]
    epochs: dict[str, int] = {}
    opened: list[str] = []
    async with (
        replica(empty_redis, lease=4, clock=clock) as one,
        replica(empty_redis, lease=4, clock=clock) as other,
    ):

        async def step(registry: RedisRegistry) -> None:
            name = source.choice(names)
            match source.choice(["join", "beat", "beat", "leave", "open", "open", "release"]):
                case "join":
                    spec = worker(name, Role.BOTH)
                    epochs[name] = (await registry.register(spec, state=READY)).epoch
                case "beat":
                    load = Load(running=source.randrange(3))
                    await registry.heartbeat(name, epochs.get(name, 1), load=load)
                case "leave":
                    await registry.deregister(name, epochs.get(name, 1))
                case "open":
                    request = TransferRequest(prompt_tokens=source.randrange(1, 200))
                    transfer = await open_transfer(
                        registry, request, seconds=source.uniform(0.5, 5), clock=clock
                    )
                    opened.append(transfer.transfer_id)
                case "release" if opened:
                    await registry.release(source.choice(opened))

        for _ in range(40):
            steps = (step(source.choice([one, other])) for _ in range(source.randrange(1, 8)))
            for answer in await asyncio.gather(*steps, return_exceptions=True):
                assert answer is None or isinstance(answer, KvxferError), answer
            clock.advance(source.uniform(0, 0.6))
            fleet = await one.instances()
            assert await other.instances() == fleet
            counted = audit(empty_redis)
            assert counted == Counter(
                {i.instance_id: n for i in fleet if (n := i.reserved.transfers)}
            )


# --- Redis loses its data --------------------------------------------------------------------


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

        snapshot = await asyncio.wait_for(anext(watch), 10)
        assert isinstance(snapshot, Snapshot)
        assert snapshot.id > first.id


async def test_data_that_is_lost_while_redis_stays_up_is_noticed(server):
    async with replica(server) as registry:
        before = await registry.register(worker("p"), state=READY)
        with server.client() as client:
            client.flushall()
        assert await registry.instances() == ()
        assert (await registry.register(worker("p"), state=READY)).epoch > before.epoch
        assert [i.instance_id for i in await registry.instances()] == ["p"]


async def test_replica_that_missed_records_loads_the_whole_again(empty_redis):
    async with replica(empty_redis, timeout=1) as registry:
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


# --- Redis is away ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["paused", "killed"])
async def test_while_redis_is_away_reads_tell_what_was_known_and_writes_are_refused(server, how):
    async with replica(server, timeout=1) as registry:
        prefill = await registry.register(worker("p"), state=READY)
        await registry.register(worker("d", Role.DECODE), state=READY)
        opened = await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
        known = await registry.instances()
        assert registry.stale_seconds is None

        server.pause() if how == "paused" else server.kill()
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
            with pytest.raises(ControlPlaneUnavailable, match="cannot be reached"):
                await write
        assert await registry.instances() == known, "what was refused counts nowhere"

        server.resume() if how == "paused" else server.start()
        await eventually(lambda: is_current(registry))
        expected = () if how == "killed" else known
        assert await registry.instances() == expected


async def test_time_in_which_nobody_could_renew_ends_no_lease(server):
    async with replica(server, lease=1.2, timeout=1) as registry:
        lease = await registry.register(worker("p"), state=READY)
        server.pause()
        await asyncio.sleep(2)
        server.resume()
        await eventually(lambda: is_current(registry))
        assert (await registry.heartbeat("p", lease.epoch)).epoch == lease.epoch


async def test_lease_ends_by_the_clock_of_redis(server):
    async with replica(server, lease=0.5) as registry:
        await registry.register(worker("p"), state=READY)
        start = await anext(registry.watch())
        watch = registry.watch(start.id)
        change = asyncio.ensure_future(anext(watch))
        async with asyncio.timeout(20):
            while not change.done():
                await registry.sweep()
                await asyncio.sleep(0.05)
        assert isinstance(change.result(), Change)
        assert change.result().cause == "lease-expired"


async def test_redis_that_was_never_there_is_waited_for(server):
    server.kill()
    async with replica(server, timeout=1, there=False) as registry:
        for call in (registry.instances(), registry.ping(), registry.register(worker("p"))):
            with pytest.raises(ControlPlaneUnavailable, match=f"127.0.0.1:{server.port}"):
                await call
        server.start()
        await eventually(lambda: is_current(registry))
        await registry.register(worker("p"))


async def test_scripts_that_redis_forgot_are_sent_again(server):
    async with replica(server) as registry:
        await registry.register(worker("p"))
        with server.client() as client:
            client.script_flush()
        await registry.register(worker("q"))
        assert len(await registry.instances()) == 2


async def test_redis_without_memory_for_more_is_an_outage_not_a_defect(server):
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


async def test_closed_registry_says_that_it_is_stopping(empty_redis):
    async with replica(empty_redis) as registry:
        await registry.close()
        for call in (registry.instances(), registry.sweep(), registry.statistics()):
            with pytest.raises(ControlPlaneUnavailable, match="stopping"):
                await call


# --- fail-over -------------------------------------------------------------------------------


async def test_sentinel_moves_the_registry_to_the_replica_of_a_master_that_died(server):
    with (
        RedisServer("--replicaof", "127.0.0.1", str(server.port)) as standby,
        RedisServer(sentinel_of=server) as sentinel,
    ):
        wait_for_replica(server, sentinel)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/fleet/0"
        async with replica(url, timeout=1) as registry:
            lease = await registry.register(worker("p"), state=READY)
            await registry.register(worker("d", Role.DECODE), state=READY)
            await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
            known = await registry.instances()
            with server.client() as client:
                assert client.wait(1, 5000) == 1
            server.kill()

            assert await registry.instances() == known
            await eventually(lambda: registry.heartbeat("p", lease.epoch))
            later = await registry.register(worker("q"), state=READY)
            assert later.epoch > max(i.epoch for i in known)
            assert [i.instance_id for i in await registry.instances()] == ["d", "p", "q"]
            assert (await registry.instance("p")).epoch == lease.epoch
        with standby.client() as client:
            assert client.info("replication")["role"] == "master"
        assert audit(standby) == {"p": 1, "d": 1}
