"""Block tables: what every implementation of the registry promises, and replicas."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.clock import SystemClock
from kvxfer.errors import (
    BlockTableExists,
    ControlPlaneUnavailable,
    UnknownBlockTable,
    UnknownTransfer,
)
from kvxfer.instances import Role, Snapshot
from kvxfer.kv.block_table import BlockTable
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import TransferRequest
from verify.polling import eventually
from verify.processes.block_tables import block_table
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer

from .redis_replica import replica
from .test_registry import LEASE, READY, open_between, take

TABLE = block_table()


@pytest.fixture
async def opened(fleet):
    """A fleet with the open transfer t-1 between p and d."""
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await open_between(fleet, "p", "d")
    return fleet


def waiting_at(registry: Registry) -> dict[str, set[asyncio.Future[None]]]:
    """Returns the waits that have no answer yet, by transfer."""
    mirror = getattr(registry, "_mirror", None)
    arrivals = registry._arrivals if mirror is None else mirror.arrivals
    return arrivals._waiting


async def ask(
    registry: Registry, transfer_id: str = "t-1", *, seconds: float = 30
) -> asyncio.Task[BlockTable]:
    """Starts a wait, and returns its task when the wait has begun."""
    before = len(waiting_at(registry).get(transfer_id, ()))
    waiting = asyncio.create_task(registry.block_table(transfer_id, wait_seconds=seconds))
    await eventually(lambda: len(waiting_at(registry).get(transfer_id, ())) > before)
    return waiting


async def test_table_is_kept_as_decode_made_it(opened):
    await opened.registry.put_block_table("t-1", TABLE)
    for _ in range(2):
        assert await opened.registry.block_table("t-1") == TABLE


async def test_transfer_accepts_one_table_and_the_same_again(opened):
    await opened.registry.put_block_table("t-1", TABLE)
    await opened.registry.put_block_table("t-1", TABLE)
    for other in (block_table(imm=65538), block_table(blocks=b"\4\0\0\0\7\0\0\0")):
        with pytest.raises(BlockTableExists, match="'t-1' has another block table already"):
            await opened.registry.put_block_table("t-1", other)
    assert await opened.registry.block_table("t-1") == TABLE


async def test_transfer_that_is_not_open_has_no_table(fleet):
    with pytest.raises(UnknownTransfer):
        await fleet.registry.put_block_table("t-1", TABLE)
    with pytest.raises(UnknownTransfer):
        await fleet.registry.block_table("t-1", wait_seconds=600)


async def test_wait_ends_with_the_table(opened):
    waits = [await ask(opened.registry) for _ in range(3)]
    await opened.registry.put_block_table("t-1", TABLE)
    assert await asyncio.gather(*waits) == [TABLE] * 3


async def test_wait_without_a_table_ends_after_its_time(opened):
    with pytest.raises(UnknownBlockTable, match="'t-1' has no block table yet"):
        await opened.registry.block_table("t-1")
    waiting = await ask(opened.registry, seconds=0.05)
    await opened.pass_time(0.5)
    with pytest.raises(UnknownBlockTable, match="'t-1' has no block table yet"):
        await waiting


async def test_news_of_other_transfers_do_not_end_a_wait(opened):
    waiting = await ask(opened.registry)
    for transfer_id in ("t-2", "t-3"):
        await open_between(opened, "p", "d", transfer_id=transfer_id)
        other = await ask(opened.registry, transfer_id)
        await opened.registry.put_block_table(transfer_id, TABLE)
        assert await other == TABLE
        await opened.registry.release(transfer_id)
    await opened.pass_time(0.5)
    assert not waiting.done()
    await opened.registry.put_block_table("t-1", TABLE)
    assert await waiting == TABLE


@pytest.mark.parametrize("end", ["released", "expired", "instance gone"])
@pytest.mark.parametrize("there", [True, False], ids=["with a table", "without"])
async def test_table_and_waits_end_with_the_transfer(opened, end, there):
    epoch = (await opened.registry.instance("d")).epoch
    if there:
        await opened.registry.put_block_table("t-1", TABLE)
    else:
        waiting = await ask(opened.registry, seconds=120)
    match end:
        case "released":
            await opened.registry.release("t-1")
        case "expired":
            for _ in range(12):
                await opened.pass_time(LEASE - 0.5)
                for name in ("p", "d"):
                    member = await opened.registry.instance(name)
                    await opened.registry.heartbeat(name, member.epoch)
        case _:
            await opened.registry.deregister("d", epoch)
    if not there:
        with pytest.raises(UnknownTransfer):
            await waiting
    with pytest.raises(UnknownTransfer):
        await opened.registry.block_table("t-1")
    # A later transfer with the same id does not find the table.
    if end == "instance gone":
        await opened.join("d", Role.DECODE)
    await open_between(opened, "p", "d")
    with pytest.raises(UnknownBlockTable):
        await opened.registry.block_table("t-1")


async def test_wait_that_is_given_up_leaves_nothing(opened):
    waiting = await ask(opened.registry)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert not waiting_at(opened.registry)


async def test_registry_that_closes_ends_the_waits(opened):
    waiting = await ask(opened.registry)
    await opened.registry.close()
    with pytest.raises(ControlPlaneUnavailable, match="stopping"):
        await waiting


async def test_watchers_of_the_fleet_do_not_hear_of_tables(opened):
    (before,) = await take(opened.registry, 1, None)
    await opened.registry.put_block_table("t-1", TABLE)
    (after,) = await take(opened.registry, 1, None)
    assert isinstance(after, Snapshot)
    assert after.id == before.id


# --- replicas --------------------------------------------------------------------------------


async def open_at(registry) -> str:
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        await registry.register(worker(name, role), state=READY)
    opened = await open_transfer(registry, TransferRequest(), seconds=60, clock=SystemClock())
    return opened.transfer_id


@pytest.mark.native
async def test_wait_at_one_replica_ends_with_a_table_at_another(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        transfer_id = await open_at(one)
        waiting = await ask(other, transfer_id)
        await one.put_block_table(transfer_id, TABLE)
        assert await waiting == TABLE
        with pytest.raises(BlockTableExists):
            await other.put_block_table(transfer_id, block_table(imm=1))
        waiting = asyncio.create_task(one.block_table(transfer_id, wait_seconds=30))
        assert await waiting == TABLE


@pytest.mark.native
async def test_wait_at_one_replica_ends_with_a_release_at_another(empty_redis):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        transfer_id = await open_at(one)
        waiting = await ask(other, transfer_id)
        await one.release(transfer_id)
        with pytest.raises(UnknownTransfer):
            await waiting


@pytest.mark.native
async def test_replica_that_comes_later_finds_the_table(empty_redis):
    async with replica(empty_redis) as one:
        transfer_id = await open_at(one)
        await one.put_block_table(transfer_id, TABLE)
        async with replica(empty_redis) as late:
            assert await late.block_table(transfer_id) == TABLE


@pytest.mark.native
async def test_table_is_in_redis_once_and_ends_with_its_transfer(empty_redis):
    table = block_table(blocks=bytes(400_000))
    async with replica(empty_redis) as one:
        transfer_id = await open_at(one)
        await one.put_block_table(transfer_id, table)
        assert await one.block_table(transfer_id) == table
        with empty_redis.client() as client:
            assert client.hlen("kvxfer:tables") == 1
            assert client.memory_usage("kvxfer:log", samples=0) < 100_000
            await one.release(transfer_id)
            assert client.hlen("kvxfer:tables") == 0


@pytest.mark.realtime
async def test_while_redis_is_unavailable_tables_and_waits_fail():
    with RedisServer() as server:
        async with replica(server, timeout=0.5) as registry:
            transfer_id = await open_at(registry)
            waiting = await ask(registry, transfer_id, seconds=2)
            server.kill()
            with pytest.raises(ControlPlaneUnavailable):
                await waiting
            for step in (
                registry.block_table(transfer_id),
                registry.put_block_table(transfer_id, TABLE),
            ):
                with pytest.raises(ControlPlaneUnavailable):
                    await step


@pytest.mark.realtime
async def test_wait_ends_if_redis_comes_back_without_its_data():
    with RedisServer() as server:
        async with replica(server, timeout=2.0) as registry:
            transfer_id = await open_at(registry)
            waiting = await ask(registry, transfer_id)
            server.kill()
            server.start()
            with pytest.raises(UnknownTransfer):
                await waiting
