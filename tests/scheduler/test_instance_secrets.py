"""The conformance suite, secrets: only a call with an instance's secret acts as the instance."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from kvxfer.errors import Forbidden, InstanceExists, StaleEpoch, UnknownInstance
from kvxfer.instances import BlockUpdate, Change, InstanceState, Load
from kvxfer.scheduler.registry import Registry
from verify.processes.control_plane import worker

from .conftest import LEASE, RegistryUnderTest
from .redis_replica import replica
from .test_registry import take

READY = InstanceState.READY
MINE, OTHERS = "a1" * 32, "b2" * 32

Act = Callable[[Registry, int, str | None], Awaitable[object]]
CALLS: dict[str, Act] = {
    "heartbeat": lambda registry, epoch, secret: registry.heartbeat("p", epoch, secret=secret),
    "blocks": lambda registry, epoch, secret: registry.publish_blocks(
        "p", epoch, BlockUpdate(added=(1,)), secret=secret
    ),
    "drain": lambda registry, _, secret: registry.drain("p", seconds=1, secret=secret),
    "deregister": lambda registry, epoch, secret: registry.deregister("p", epoch, secret=secret),
    "require": lambda registry, _, secret: registry.require_secret("p", secret or ""),
}


async def join(fleet: RegistryUnderTest, **options: str) -> int:
    lease = await fleet.registry.register(worker("p"), state=READY, secret=MINE, **options)
    return lease.epoch


@pytest.mark.parametrize("call", CALLS)
async def test_call_with_another_secret_changes_nothing(fleet, call):
    epoch = await join(fleet)
    before = await fleet.registry.instance("p")
    for shown, said in ((OTHERS, "shows another one"), ("", "shows none")):
        needs = f"as instance 'p' needs the secret of its lease, and this one {said}"
        with pytest.raises(Forbidden, match=needs) as refused:
            await CALLS[call](fleet.registry, epoch, shown)
        assert refused.value.details == {"instance_id": "p"}
    assert await fleet.registry.instance("p") == before
    await CALLS[call](fleet.registry, epoch, MINE)


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"require"}))
async def test_caller_that_is_no_worker_needs_no_secret(fleet, call):
    await CALLS[call](fleet.registry, await join(fleet), None)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shown", ["", OTHERS])
async def test_instance_that_took_no_secret_needs_none(fleet, call, shown):
    lease = await fleet.join("p")
    assert not (await fleet.registry.instance("p")).has_secret
    await CALLS[call](fleet.registry, lease.epoch, shown)


async def test_each_registration_has_another_secret(fleet):
    first = await join(fleet, incarnation="i")
    lease = await fleet.registry.register(worker("p"), incarnation="i", secret=OTHERS)
    with pytest.raises(StaleEpoch):
        await fleet.registry.heartbeat("p", first, secret=MINE)
    with pytest.raises(Forbidden):
        await fleet.registry.heartbeat("p", lease.epoch, secret=MINE)
    await fleet.registry.heartbeat("p", lease.epoch, secret=OTHERS)


async def test_live_id_is_refused_to_another_process(fleet):
    epoch = await join(fleet, incarnation="i")
    for incarnation in ("", "another"):
        with pytest.raises(InstanceExists):
            await fleet.registry.register(worker("p"), incarnation=incarnation, secret=OTHERS)
    await fleet.registry.heartbeat("p", epoch, secret=MINE)
    await fleet.pass_time(LEASE + 1)
    lease = await fleet.registry.register(worker("p"), incarnation="another", secret=OTHERS)
    await fleet.registry.heartbeat("p", lease.epoch, secret=OTHERS)


async def test_secret_of_an_unknown_instance_is_not_asked_for(fleet):
    with pytest.raises(UnknownInstance):
        await fleet.registry.require_secret("p", MINE)


async def test_reads_show_that_there_is_a_secret_but_not_the_secret(fleet):
    epoch = await join(fleet)
    await fleet.registry.drain("p", seconds=1)
    told = await fleet.registry.instance("p")
    assert told.has_secret
    (change,) = await take(fleet.registry, 1, epoch)
    assert isinstance(change, Change)
    assert change.instance.has_secret
    everything = msgspec.json.encode([told, change, await fleet.registry.instances()])
    assert MINE.encode() not in everything


@pytest.mark.native
async def test_secret_holds_at_every_replica(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        lease = await one.register(worker("p"), state=READY, secret=MINE)
        for call in CALLS.values():
            with pytest.raises(Forbidden):
                await call(other, lease.epoch, OTHERS)
        assert (await other.instance("p")).has_secret
        await other.heartbeat("p", lease.epoch, secret=MINE)
    async with replica(empty_redis) as later:
        assert (await later.instance("p")).has_secret


@pytest.mark.native
async def test_heartbeat_with_a_secret_writes_no_more_to_the_log(empty_redis):
    async with replica(empty_redis) as registry:
        sizes = {}
        for name, secret in (("p", ""), ("q", MINE)):
            lease = await registry.register(worker(name), state=READY, secret=secret)
            await registry.heartbeat(name, lease.epoch, load=Load(running=1), secret=secret)
            with empty_redis.client() as client:
                ((_, beat),) = client.xrevrange("kvxfer:log", count=1)
            assert beat[b"kind"] == b"beat"
            sizes[name] = sum(map(len, beat.values()))
        assert sizes["p"] == sizes["q"]
