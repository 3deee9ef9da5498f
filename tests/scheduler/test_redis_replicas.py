"""Promises of several replicas over one Redis, beyond the conformance suite."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from msgspec.structs import replace

from kvxfer.clock import SystemClock
from kvxfer.errors import KvxferError, NoCapacity
from kvxfer.instances import InstanceState, Load, Role
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from tests.virtual_time import VirtualClock
from verify.processes.control_plane import worker
from verify.processes.redis_server import audit

from .redis_replica import replica

pytestmark = pytest.mark.native

READY = InstanceState.READY


async def test_a_step_of_one_replica_shows_in_the_next_answer_of_every_other(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        for number in range(50):
            name = f"p-{number}"
            lease = await one.register(worker(name), state=READY)
            assert (await other.instance(name)).epoch == lease.epoch
            await other.heartbeat(name, lease.epoch, load=Load(running=number))
            assert (await one.instance(name)).load.running == number
        assert await one.instances() == await other.instances()


async def test_every_replica_knows_drain_role_and_transfers(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        leases = {
            name: await one.register(worker(name, role), state=READY)
            for name, role in (("p", Role.PREFILL), ("d", Role.DECODE))
        }
        opened = await open_transfer(one, TransferRequest(), seconds=60, clock=SystemClock())
        drained = await one.drain("p", seconds=30)
        moved = await other.change_role("d", Role.BOTH)
        for registry in (one, other):
            assert await registry.transfers() == (opened,)
            told = await registry.heartbeat("p", leases["p"].epoch)
            assert 0 < told.drain_seconds <= 30
            assert told.reserved.transfers == 1
            assert (await registry.heartbeat("d", leases["d"].epoch)).role is Role.BOTH
        async with replica(empty_redis) as late:
            for name, expected in (("p", drained), ("d", moved)):
                found = await late.instance(name)
                assert replace(found, heartbeat_at=expected.heartbeat_at) == expected
            assert await late.transfers() == (opened,)


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


async def test_reservation_of_a_replica_that_died_ends_at_its_time(empty_redis):
    clock = VirtualClock()
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


async def test_reservation_is_not_shown_before_redis_has_it(empty_redis):
    async with replica(empty_redis) as registry:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            await registry.register(worker(name, role), state=READY)
        kept, under_way = [
            await open_transfer(
                registry, TransferRequest(prompt_tokens=40), seconds=60, clock=clock
            )
            for clock in (SystemClock(), SystemClock())
        ]
        await registry.release(under_way.transfer_id)
        counted = await registry.instances()
        # The state while Redis is asked for the reservation.
        registry._mirror.open(under_way)
        assert registry._mirror.fleet.get("p").reserved.transfers == 2
        assert await registry.instances() == counted
        assert [await registry.instance(name) for name in ("d", "p")] == list(counted)
        assert (await anext(registry.watch())).instances == counted
        assert (await registry.statistics()).open_transfers == 1
        assert await registry.transfers() == (kept,)


async def test_watch_resumes_at_another_replica_even_one_that_starts_later(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        start = await anext(one.watch())
        for name in ("a", "b", "c"):
            await one.register(worker(name))
        async with replica(empty_redis) as late:
            for registry in (other, late):
                watch = registry.watch(start.id)
                changes = [await anext(watch) for _ in range(3)]
                assert [change.instance.instance_id for change in changes] == ["a", "b", "c"]
                watch = registry.watch(changes[1].id)
                assert await anext(watch) == changes[2]


async def test_replicas_agree_with_each_other_and_with_redis_after_any_history(empty_redis, seed):
    source = random.Random(seed)
    clock = VirtualClock()
    names = [f"w-{n}" for n in range(6)]
    epochs: dict[str, int] = {}
    opened: list[str] = []
    async with (
        replica(empty_redis, lease=4, clock=clock) as one,
        replica(empty_redis, lease=4, clock=clock) as other,
    ):

        async def step(registry: RedisRegistry) -> None:
            name = source.choice(names)
            steps = ["join", "beat", "beat", "leave", "open", "open", "release", "drain", "role"]
            match source.choice(steps):
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
                case "drain":
                    await registry.drain(name, seconds=source.uniform(0, 5))
                case "role":
                    await registry.change_role(name, source.choice(list(Role)))
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
