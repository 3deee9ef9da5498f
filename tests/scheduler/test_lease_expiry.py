"""Many leases that run out at once: what every call sees, and when they are extended instead."""

from __future__ import annotations

import logging

import pytest

from kvxfer.errors import StaleEpoch, UnknownInstance, UnknownTransfer
from kvxfer.instances import InstanceState, Lease, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_guard import spared
from kvxfer.scheduler.redis_registry import RedisRegistry

from .conftest import LEASE, RegistryUnderTest
from .test_registry import open_between

MANY = 250


async def about_to_end(fleet: RegistryUnderTest) -> dict[str, Lease]:
    """Returns leases: many that have just run out, and those of `z` and `d`, which were renewed."""
    names = [f"p{number:03}" for number in range(MANY)]
    leases = {name: await fleet.join(name) for name in (*names, "z")}
    leases["d"] = await fleet.join("d", Role.DECODE, num_blocks=8)
    await open_between(fleet, "p249", "d", transfer_id="of-a-dead-one", blocks=4)
    await open_between(fleet, "z", "d", transfer_id="too-old", blocks=4, seconds=LEASE)
    await fleet.pass_time(LEASE - 0.2)
    for name in ("z", "d"):
        await fleet.registry.heartbeat(name, leases[name].epoch)
    fleet.clock.advance(0.3)
    return leases


@pytest.mark.parametrize("first", ["heartbeat", "drain", "release", "table", "reserve", "list"])
async def test_expired_leases_and_transfers_are_gone_for_the_first_call_that_follows(fleet, first):
    leases = await about_to_end(fleet)
    registry = fleet.registry
    match first:
        case "heartbeat":
            with pytest.raises(StaleEpoch, match="register again"):
                await registry.heartbeat("p249", leases["p249"].epoch)
        case "drain":
            with pytest.raises(UnknownInstance):
                await registry.drain("p249", seconds=1)
        case "release":
            with pytest.raises(UnknownTransfer):
                await registry.release("of-a-dead-one")
        case "table":
            with pytest.raises(UnknownTransfer):
                await registry.block_table("too-old")
        case "reserve":
            transfer = await open_between(fleet, "z", "d", transfer_id="new", blocks=8)
            assert await registry.transfers() == (transfer,)
        case _:
            assert [i.instance_id for i in await registry.instances()] == ["d", "z"]
    assert (await registry.statistics()).leases_expired == MANY
    assert [i.instance_id for i in await registry.instances()] == ["d", "z"]


@pytest.mark.native
async def test_a_step_in_redis_ends_only_a_portion_of_expired_leases(empty_redis, clock):
    registry = RedisRegistry(empty_redis.url, clock=clock, timeout=60)
    await registry.open()
    fleet = RegistryUnderTest(registry, clock)
    await about_to_end(fleet)
    with empty_redis.client() as client:
        for left in (MANY + 2 - 101, MANY + 2 - 201, 2, 2):
            with pytest.raises(UnknownInstance):
                # The step ends the lease that it needs in addition to the portion.
                await registry.deregister("p249", 1)
            assert client.hlen("kvxfer:instances") == left
    await registry.close()


# --- shortly after the registry was unavailable ----------------------------------------------


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.native)])
async def silenced(request, clock):
    """A registry that notices a silence of a second."""
    registry = (
        EmbeddedRegistry(clock=clock, silence_seconds=1.0)
        if request.param == "embedded"
        else RedisRegistry(request.getfixturevalue("empty_redis").url, clock=clock, timeout=60)
    )
    await registry.open()
    yield RegistryUnderTest(registry, clock)
    await registry.close()


async def living(fleet: RegistryUnderTest) -> int:
    return len(await fleet.registry.instances())


async def test_most_of_a_fleet_gets_one_more_lease_once(silenced, caplog):
    caplog.set_level(logging.WARNING)
    for number in range(12):
        await silenced.join(f"p{number}")
    await silenced.pass_time(1)
    silenced.clock.advance(30)
    await silenced.pass_time(LEASE)
    assert await living(silenced) == 12
    assert (await silenced.registry.statistics()).leases_spared == 12
    assert "12 leases are extended once" in caplog.text
    await silenced.pass_time(LEASE)
    assert await living(silenced) == 0


@pytest.mark.parametrize("case", ["well", "few", "long after", "half"])
async def test_leases_end_at_their_time_where(silenced, case):
    dying = 9 if case == "few" else 12
    for number in range(dying):
        await silenced.join(f"p{number}")
    others = [await silenced.join(f"q{number}") for number in range(12 if case == "half" else 0)]
    if case != "well":
        silenced.clock.advance(30)
    if case == "long after":
        for _ in range(8):
            await silenced.pass_time(LEASE / 3)
            for number in range(dying):
                instance = await silenced.registry.instance(f"p{number}")
                await silenced.registry.heartbeat(instance.instance_id, instance.epoch)
    for _ in range(4):
        await silenced.pass_time(LEASE / 3)
        for other in others:
            await silenced.registry.heartbeat(other.instance_id, other.epoch)
    assert await living(silenced) == len(others)
    assert (await silenced.registry.statistics()).leases_spared == 0


async def test_most_of_a_zone_gets_one_more_lease(silenced):
    for number in range(11):
        await silenced.join(f"a{number}", labels={"zone": "a"})
    others = [
        await silenced.join(f"b{number}", labels={"zone": "b"} if number else {})
        for number in range(30)
    ]
    silenced.clock.advance(30)
    for _ in range(4):
        await silenced.pass_time(LEASE / 3)
        for other in others:
            await silenced.registry.heartbeat(other.instance_id, other.epoch)
    assert await living(silenced) == 41
    assert (await silenced.registry.statistics()).leases_spared == 11
    assert (await silenced.registry.instance("a0")).state is InstanceState.READY


@pytest.mark.parametrize(
    ("late", "fleet", "expected"),
    [
        ({"": 9}, {"": 9}, 0),
        ({"": 10}, {"": 19}, 10),
        ({"": 10}, {"": 20}, 0),
        ({"a": 10}, {"a": 19, "b": 90}, 10),
        ({"a": 10, "b": 9}, {"a": 19, "b": 9, "": 90}, 10),
        ({"a": 10}, {"a": 20, "b": 90}, 0),
    ],
)
def test_late_instances_that_are_spared(late, fleet, expected):
    def named(zones: dict[str, int]) -> dict[str, str]:
        return {f"{zone}{n}": zone for zone, count in zones.items() for n in range(count)}

    assert len(spared(named(late), named(fleet))) == expected
