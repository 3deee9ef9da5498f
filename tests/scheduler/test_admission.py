"""Requests that wait for a pair: their order, what wakes them, and what they leave behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvxfer.errors import ControlPlaneUnavailable, NoCapacity, PromptTooLong
from kvxfer.instances import InstanceState, Load, Role
from kvxfer.scheduler.admission import OTHERS, Admission
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.transfers import Transfer, TransferRequest
from tests.virtual_time import passes
from verify.polling import eventually
from verify.processes.control_plane import worker

from .conftest import RegistryUnderTest
from .redis_replica import replica

# The tokens of all 64 blocks of an instance, 16 each.
WHOLE = 1024


def waiting(seconds: float = 30.0, **members: Any) -> TransferRequest:
    return TransferRequest(**{"prompt_tokens": WHOLE, "wait_seconds": seconds, **members})


def admission_of(registry: Any, clock: Any, **settings: Any) -> Admission:
    return Admission(registry, **{"seconds": 600.0, "max_waiting": 100, "clock": clock, **settings})


async def queued(admission: Admission, count: int) -> None:
    """Waits until `count` requests wait."""
    await eventually(lambda: sum(admission.waiting.values()) == count)


async def enter(admission: Admission, request: TransferRequest) -> asyncio.Task[Transfer]:
    there = sum(admission.waiting.values())
    task = asyncio.create_task(admission.open(request))
    await queued(admission, there + 1)
    return task


@pytest.fixture
async def full(fleet: RegistryUnderTest) -> AsyncIterator[tuple[RegistryUnderTest, Transfer]]:
    """A fleet with one pair, and the transfer that fills it."""
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    admission = admission_of(fleet.registry, fleet.clock)
    yield fleet, await admission.open(TransferRequest(prompt_tokens=WHOLE))


async def release(fleet: RegistryUnderTest, transfer: Transfer) -> None:
    await fleet.registry.release(transfer.transfer_id)


async def test_waiting_request_gets_the_pair_that_is_given_back(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock)
    task = await enter(admission, waiting(request_id="next"))
    await release(fleet, held)
    transfer = await task
    assert (transfer.request_id, transfer.prefill.instance_id) == ("next", "p")
    assert await fleet.registry.transfer(transfer.transfer_id) == transfer
    assert admission.waiting == {OTHERS: 0}


async def newly_registered(fleet: RegistryUnderTest) -> Callable[[], Any]:
    return lambda: fleet.join("q", Role.BOTH)


async def newly_ready(fleet: RegistryUnderTest) -> Callable[[], Any]:
    lease = await fleet.join("q", Role.BOTH, state=InstanceState.JOINING)
    return lambda: fleet.registry.heartbeat("q", lease.epoch, state=InstanceState.READY)


async def with_free_blocks(fleet: RegistryUnderTest) -> Callable[[], Any]:
    lease = await fleet.join("q", Role.BOTH)
    await fleet.registry.heartbeat("q", lease.epoch, load=Load(free_blocks=3))
    return lambda: fleet.registry.heartbeat("q", lease.epoch, load=Load(free_blocks=64))


async def in_another_role(fleet: RegistryUnderTest) -> Callable[[], Any]:
    await fleet.join("q", Role.PREFILL)
    return lambda: fleet.registry.change_role("q", Role.DECODE)


async def with_the_adapter(fleet: RegistryUnderTest) -> Callable[[], Any]:
    lease = await fleet.join("q", Role.DECODE)
    return lambda: fleet.registry.heartbeat("q", lease.epoch, load=Load(models=("sql",)))


@pytest.mark.parametrize(
    "prepared",
    [newly_registered, newly_ready, with_free_blocks, in_another_role, with_the_adapter],
)
async def test_every_kind_of_new_room_wakes_a_request(fleet, prepared):
    lease = await fleet.join("p")
    model = "sql" if prepared is with_the_adapter else None
    if model is not None:
        await fleet.registry.heartbeat("p", lease.epoch, load=Load(models=(model,)))
    make_room = await prepared(fleet)
    admission = admission_of(fleet.registry, fleet.clock)
    task = await enter(admission, waiting(model=model))
    await make_room()
    assert (await task).decode.instance_id == "q"


async def order_of_service(
    fleet: RegistryUnderTest, held: Transfer, admission: Admission, asked: list[TransferRequest]
) -> list[str]:
    """Enters the requests in this order, and returns their ids in the order of their service."""
    tasks = [await enter(admission, request) for request in asked]
    served = []
    for _ in asked:
        await release(fleet, held)
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        (task,) = done
        tasks.remove(task)
        held = task.result()
        served.append(held.request_id)
    return served


async def test_first_come_first_served_within_a_priority(full):
    fleet, held = full
    asked = [
        waiting(request_id=name, priority=priority)
        for name, priority in [("a", 0), ("b", 0), ("c", -1), ("d", 5), ("e", -1), ("f", 0)]
    ]
    admission = admission_of(fleet.registry, fleet.clock)
    assert await order_of_service(fleet, held, admission, asked) == ["c", "e", "a", "b", "f", "d"]


async def test_tenants_take_turns_by_their_weights_and_unknown_ones_share_one(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock, tenants={"gold": 2.0, "iron": 1.0})
    asked = [waiting(request_id=name, tenant=name) for name in ["iron"] * 8 + ["gold"] * 8]
    asked += [waiting(request_id=f"u{n}", tenant=f"unknown{n}") for n in range(8)]
    served = await order_of_service(fleet, held, admission, asked)
    first = Counter(name if name in ("gold", "iron") else "unknown" for name in served[:12])
    assert first == {"gold": 6, "iron": 3, "unknown": 3}
    assert [name for name in served if name.startswith("u")] == [f"u{n}" for n in range(8)]


async def test_turns_count_in_tokens(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock, tenants={"long": 1.0, "short": 1.0})
    asked = [waiting(request_id="long", tenant="long") for _ in range(3)]
    asked += [
        waiting(request_id="short", tenant="short", prompt_tokens=WHOLE // 2 + 1) for _ in range(6)
    ]
    served = await order_of_service(fleet, held, admission, asked)
    assert Counter(served[:6]) == {"long": 2, "short": 4}


async def test_new_tenant_has_no_claim_for_the_time_before(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock, tenants={"old": 1.0, "new": 1.0})
    tasks = [await enter(admission, waiting(request_id="old", tenant="old")) for _ in range(8)]
    served = []

    async def serve() -> None:
        nonlocal held
        await release(fleet, held)
        (task,) = (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]
        tasks.remove(task)
        held = task.result()
        served.append(held.request_id)

    for _ in range(4):
        await serve()
    tasks += [await enter(admission, waiting(request_id="new", tenant="new")) for _ in range(4)]
    for _ in range(4):
        await serve()
    assert served[:4] == ["old"] * 4
    assert Counter(served[4:]) == {"old": 2, "new": 2}
    for task in tasks:
        task.cancel()


async def test_large_request_is_not_overtaken_by_small_ones_of_its_model(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock)
    await release(fleet, held)
    half = await admission.open(TransferRequest(prompt_tokens=WHOLE // 2))
    large = await enter(admission, waiting())
    small = await enter(admission, waiting(prompt_tokens=16))
    with pytest.raises(NoCapacity, match="others wait"):
        await admission.open(TransferRequest(prompt_tokens=16))
    await release(fleet, half)
    assert (await large).prefill_blocks == 64
    await release(fleet, large.result())
    assert (await small).prefill_blocks == 1


async def test_requests_of_other_models_are_not_held_up(full):
    fleet, _ = full
    await fleet.join("p2", model="qwen")
    await fleet.join("d2", Role.DECODE, model="qwen")
    admission = admission_of(fleet.registry, fleet.clock)
    stuck = await enter(admission, waiting(model="llama"))
    first = await admission.open(waiting(model="qwen"))
    second = await enter(admission, waiting(model="qwen"))
    assert not stuck.done()
    await release(fleet, first)
    assert (await second).model == "qwen"
    stuck.cancel()


async def test_beyond_the_limit_the_tenant_with_the_most_requests_loses_its_last(full):
    fleet, _ = full
    admission = admission_of(
        fleet.registry, fleet.clock, max_waiting=4, tenants={"a": 1.0, "b": 1.0}
    )
    tasks = [await enter(admission, waiting(tenant="a", request_id=f"a{n}")) for n in range(4)]
    with pytest.raises(NoCapacity, match="4 requests wait, which is the limit") as refused:
        await admission.open(waiting(tenant="a"))
    assert refused.value.details["retry_after_seconds"] == 60.0
    coming = asyncio.create_task(admission.open(waiting(tenant="b")))
    with pytest.raises(NoCapacity):
        await tasks.pop()
    assert admission.waiting == {OTHERS: 0, "a": 3, "b": 1}
    # within one tenant, the last of the worst priority is refused
    urgent = asyncio.create_task(admission.open(waiting(tenant="a", priority=-1)))
    with pytest.raises(NoCapacity):
        await tasks.pop()
    for task in (*tasks, coming, urgent):
        task.cancel()


async def test_tenant_beyond_its_share_is_refused_while_another_one_waits(full):
    fleet, _ = full
    admission = admission_of(
        fleet.registry, fleet.clock, max_waiting=8, tenants={"a": 3.0, "b": 1.0}
    )
    tasks = [await enter(admission, waiting(tenant="a")) for _ in range(2)]
    tasks += [await enter(admission, waiting(tenant="b")) for _ in range(2)]
    with pytest.raises(
        NoCapacity, match="2 requests of its tenant wait, which is the limit"
    ) as said:
        await admission.open(waiting(tenant="b"))
    assert said.value.details["retry_after_seconds"] > 0
    tasks += [await enter(admission, waiting(tenant="a")) for _ in range(4)]
    assert admission.waiting == {OTHERS: 0, "a": 6, "b": 2}
    for task in tasks:
        assert not task.done()
        task.cancel()


async def test_place_of_a_request_counts_the_time_that_it_waited_before(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock, max_waiting=2)
    first, second = [await enter(admission, waiting(request_id=n)) for n in ("first", "second")]
    await fleet.pass_time(1.0)
    back = asyncio.create_task(admission.open(waiting(waited_seconds=5.0, request_id="back")))
    with pytest.raises(NoCapacity):
        await second
    await release(fleet, held)
    assert (await back).request_id == "back"
    first.cancel()


async def test_refusal_says_when_to_retry_from_the_rate_of_service(full):
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock, max_waiting=10)
    tasks = [await enter(admission, waiting()) for _ in range(10)]
    for _ in range(5):
        await fleet.pass_time(1.0)
        await release(fleet, held)
        held = await tasks.pop(0)
    tasks += [await enter(admission, waiting()) for _ in range(5)]
    with pytest.raises(NoCapacity) as refused:
        await admission.open(waiting())
    # 10 are before it, and one is served each second
    assert 8 <= float(str(refused.value.details["retry_after_seconds"])) <= 12
    for task in tasks:
        task.cancel()


async def test_wait_that_ends_without_a_pair_names_what_is_missing(full):
    fleet, _ = full
    admission = admission_of(fleet.registry, fleet.clock)
    with pytest.raises(NoCapacity, match=r"within the 0\.05 s") as refused:
        await admission.open(waiting(0.05))
    assert refused.value.details["reasons"] == [
        "no prefill instance has the 64 KV blocks free (most: 'p' with 0)",
        "no decode instance has the 64 KV blocks free (most: 'd' with 0)",
    ]


async def test_request_that_fits_no_instance_is_refused_at_once(full):
    fleet, _ = full
    with pytest.raises(PromptTooLong):
        await admission_of(fleet.registry, fleet.clock).open(waiting(prompt_tokens=WHOLE + 1))


@pytest.mark.parametrize("turns", range(6))
async def test_request_that_is_given_up_leaves_nothing(full, turns):
    """Holds also at the moment in which the request gets its pair."""
    fleet, held = full
    admission = admission_of(fleet.registry, fleet.clock)
    task = await enter(admission, waiting())
    await release(fleet, held)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert admission.waiting == {OTHERS: 0}

    async def is_given_back() -> bool:
        return len(await fleet.registry.transfers()) == (not task.cancelled())

    await eventually(is_given_back)


async def test_admission_that_closes_refuses_all_that_wait(full):
    fleet, _ = full
    admission = admission_of(fleet.registry, fleet.clock)
    tasks = [await enter(admission, waiting()) for _ in range(3)]
    admission.close()
    for task in tasks:
        with pytest.raises(ControlPlaneUnavailable):
            await task


@pytest.mark.native
async def test_room_at_one_replica_wakes_requests_at_another(empty_redis, clock):
    async with replica(empty_redis) as one, replica(empty_redis) as other:
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            await one.register(worker(name, role), state=InstanceState.READY)
        held = await admission_of(one, clock).open(TransferRequest(prompt_tokens=WHOLE))
        admissions = [admission_of(each, clock) for each in (one, other)]
        await other.instances()
        tasks = [await enter(each, waiting()) for each in admissions * 2]
        await one.release(held.transfer_id)
        for _ in range(4):
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == 1, "two requests got the same blocks"
            tasks.remove(task := done.pop())
            await other.release(task.result().transfer_id)


async def test_overload_keeps_the_fleet_busy_and_tenants_equal(clock, seed):
    """Three times what the fleet can serve for five minutes, two thirds of it from one tenant."""
    source = random.Random(seed)
    registry = EmbeddedRegistry(LeasePolicy(lease_seconds=1e6), clock=clock)
    for n in range(4):
        for role in (Role.PREFILL, Role.DECODE):
            await registry.register(worker(f"{role}{n}", role), state=InstanceState.READY)
    admission = admission_of(registry, clock, max_waiting=40, tenants={"calm": 1.0, "loud": 1.0})
    served, waits, busy = Counter[str](), dict[str, list[float]](), 0.0
    outcomes = Counter[str]()

    async def one(tenant: str) -> None:
        nonlocal busy
        tokens, seconds, began = source.choice([256, 512]), source.uniform(1, 3), clock.monotonic()
        try:
            transfer = await admission.open(waiting(10.0, tenant=tenant, prompt_tokens=tokens))
        except NoCapacity as error:
            full = "retry_after_seconds" in error.details
            outcomes["refused" if full else "in vain"] += 1
            return
        outcomes["served"] += 1
        waits.setdefault(tenant, []).append(clock.monotonic() - began)
        await passes(seconds)
        if clock.monotonic() < end:
            served[tenant] += tokens
        busy += tokens * seconds
        await registry.release(transfer.transfer_id)

    begin, end = clock.monotonic(), clock.monotonic() + 300.0
    rate = 3 * 4 * WHOLE / (384 * 2.0)  # prompts a second
    tasks = set()
    while clock.monotonic() < end:
        await passes(source.expovariate(rate))
        tasks.add(asyncio.create_task(one("calm" if source.random() < 1 / 3 else "loud")))
    await asyncio.gather(*tasks)

    capacity = 4 * WHOLE * (end - begin)
    assert busy >= 0.9 * capacity
    assert served["calm"] == pytest.approx(served["loud"], rel=0.1)
    assert outcomes["served"] > 1000
    assert outcomes["refused"] > 1000
