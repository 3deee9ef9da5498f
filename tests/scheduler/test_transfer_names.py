"""Transfers whose caller gives the id: a repeated request opens them once."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.clock import SystemClock
from kvxfer.errors import ControlPlaneUnavailable, NoCapacity, TransferExists
from kvxfer.instances import InstanceState, Role
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import Transfer, TransferRequest
from verify.polling import eventually
from verify.processes.control_plane import worker
from verify.processes.redis_server import RedisServer, audit

from .conftest import RegistryUnderTest
from .redis_replica import is_current, replica

READY = InstanceState.READY
NAMED = TransferRequest(transfer_id="t-1", request_id="r", model="llama", prompt_tokens=128)


async def ask(fleet: RegistryUnderTest, request: TransferRequest) -> Transfer:
    return await open_transfer(fleet.registry, request, seconds=60, clock=fleet.clock)


async def test_a_transfer_asked_for_again_is_the_same_and_counts_once(fleet):
    await fleet.join("p")
    for number in range(3):
        await fleet.join(f"d{number}", Role.DECODE)
    first = await ask(fleet, NAMED)
    fleet.clock.advance(0.5)
    await ask(fleet, TransferRequest(prompt_tokens=16))  # now another pair is the best
    assert await ask(fleet, NAMED) == first
    assert first.transfer_id == "t-1"
    assert len(await fleet.registry.transfers()) == 2
    assert (await fleet.registry.statistics()).transfers_opened == 2
    assert (await fleet.registry.instance("p")).reserved.transfers == 2
    await fleet.registry.release("t-1")
    again = await ask(fleet, NAMED)
    assert again.created_at > first.created_at, "the name is free again"


async def test_concurrent_requests_for_one_id_get_one_transfer(fleet):
    await fleet.join("p")
    for number in range(4):
        await fleet.join(f"d{number}", Role.DECODE)
    answers = await asyncio.gather(*(ask(fleet, NAMED) for _ in range(8)))
    assert len({each.decode.instance_id for each in answers}) == 1
    instances = await fleet.registry.instances()
    assert sum(each.reserved.transfers for each in instances) == 2


async def test_a_transfer_that_took_all_blocks_is_found_again(fleet):
    await fleet.join("p", num_blocks=8)
    await fleet.join("d", Role.DECODE, num_blocks=8)
    first = await ask(fleet, NAMED)
    with pytest.raises(NoCapacity):
        await ask(fleet, TransferRequest(prompt_tokens=128))
    assert await ask(fleet, NAMED) == first


@pytest.mark.parametrize("room", [8, 100])
@pytest.mark.parametrize("other", [{"request_id": "s"}, {"prompt_tokens": 100}])
async def test_the_name_of_another_request_is_refused(fleet, room, other):
    await fleet.join("p", num_blocks=room)
    await fleet.join("d", Role.DECODE, num_blocks=room)
    await ask(fleet, NAMED)
    members = {"transfer_id": "t-1", "request_id": "r", "model": "llama", "prompt_tokens": 128}
    with pytest.raises(TransferExists, match="take a new transfer_id"):
        await ask(fleet, TransferRequest(**{**members, **other}))
    assert len(await fleet.registry.transfers()) == 1


async def test_the_name_of_a_transfer_of_another_model_is_refused(fleet):
    for model in ("llama", "other"):
        await fleet.join(f"p-{model}", model=model)
        await fleet.join(f"d-{model}", Role.DECODE, model=model)
    await ask(fleet, NAMED)
    request = TransferRequest(transfer_id="t-1", request_id="r", model="other", prompt_tokens=128)
    with pytest.raises(TransferExists):
        await ask(fleet, request)


# --- an answer of Redis that is lost ---------------------------------------------------------


async def joined(registry: RedisRegistry) -> None:
    await registry.register(worker("p"), state=READY)
    await registry.register(worker("d", Role.DECODE), state=READY)


async def reserved_without_an_answer(server: RedisServer, registry: RedisRegistry) -> None:
    """Makes Redis freeze with the reservation in its queue, so that its answer is lost."""
    with server.client() as client:
        client.client_pause(10_000)
        asked = asyncio.create_task(open_transfer(registry, NAMED, seconds=60, clock=SystemClock()))
        with pytest.raises(ControlPlaneUnavailable, match="no answer in time"):
            await asked


@pytest.mark.realtime
async def test_a_reservation_without_an_answer_is_given_back():
    with RedisServer() as server:
        async with replica(server, timeout=1) as registry:
            await joined(registry)
            await reserved_without_an_answer(server, registry)
            with server.client() as client:
                client.client_unpause()

            async def given_back() -> bool:
                return (await is_current(registry)) and not registry._abandoned

            await eventually(given_back)
            assert audit(server) == {}


@pytest.mark.native
@pytest.mark.parametrize("where", ["here", "at another replica"])
async def test_a_reservation_that_is_asked_for_again_is_kept(empty_redis, where):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        await joined(one)
        first = await open_transfer(one, NAMED, seconds=60, clock=SystemClock())
        one._abandoned.add("t-1")  # the state after its answer was lost
        again = one if where == "here" else other
        assert await open_transfer(again, NAMED, seconds=60, clock=SystemClock()) == first
        await one._release_abandoned()
        assert await one.transfer("t-1") == first
        assert audit(empty_redis) == {"p": 1, "d": 1}


@pytest.mark.native
async def test_an_abandoned_reservation_is_given_back_and_counts_as_expired(empty_redis):
    async with replica(empty_redis) as registry:
        await joined(registry)
        await open_transfer(registry, NAMED, seconds=60, clock=SystemClock())
        registry._abandoned.add("t-1")
        await registry._release_abandoned()
        assert await registry.transfers() == ()
        assert (await registry.instance("d")).started == 0
        assert audit(empty_redis) == {}
