"""The conformance suite, continued: cached blocks, reasons, and nothing promised twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvxfer.errors import NoCapacity, StaleEpoch
from kvxfer.instances import BlockUpdate, InstanceState, Load, PublishedBlocks, Role
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, chain_hashes, pack
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.transfers import Transfer, TransferRequest
from tests.virtual_time import VirtualClock
from verify.processes.control_plane import worker

from .conftest import LEASE, RegistryUnderTest
from .redis_replica import replica

HASHES = chain_hashes(range(640), 16)


def update(added: tuple[int, ...] = (), removed: tuple[int, ...] = (), **more: bool) -> BlockUpdate:
    return BlockUpdate(added=added, removed=removed, **more)


async def choose(registry: Registry, hashes: tuple[int, ...] = HASHES) -> tuple[str, int]:
    """Returns the prefill chosen for these hashes, and the tokens that it seems to have cached."""
    await registry.instances()  # a choice may be a moment old; a read is current
    pair = await registry.choose(TransferRequest(prefix_hashes=hashes, explain=True))
    assert pair.score is not None
    return pair.prefill.instance_id, pair.score.prefix_tokens


async def join_three(fleet: RegistryUnderTest) -> dict[str, int]:
    leases = [await fleet.join(name) for name in ("p", "q")]
    leases.append(await fleet.join("d", Role.DECODE))
    return {lease.instance_id: lease.epoch for lease in leases}


async def test_published_blocks_attract_prompts_until_they_are_removed(fleet):
    epochs = await join_three(fleet)
    assert await choose(fleet.registry) == ("p", 0)
    held = await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES[:10]))
    assert held == PublishedBlocks(held=10, capacity=MAX_HASHES_PER_INSTANCE)
    assert await choose(fleet.registry) == ("q", 160)
    held = await fleet.registry.publish_blocks("q", epochs["q"], update((), HASHES[8:10]))
    assert held.held == 8
    assert await choose(fleet.registry) == ("q", 128)
    await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES[:2], reset=True))
    assert await choose(fleet.registry) == ("q", 32)
    held = await fleet.registry.publish_blocks("q", epochs["q"], update(reset=True))
    assert held.held == 0
    assert await choose(fleet.registry) == ("p", 0)


async def test_same_update_again_changes_nothing(fleet):
    epochs = await join_three(fleet)
    for _ in range(2):
        step = update(HASHES[:10], (1, 2))
        assert (await fleet.registry.publish_blocks("q", epochs["q"], step)).held == 10
    assert await choose(fleet.registry) == ("q", 160)


async def test_blocks_beyond_the_limit_replace_all_earlier_ones(fleet):
    epochs = await join_three(fleet)
    await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES[:2]))
    for start in range(0, MAX_HASHES_PER_INSTANCE, 1024):
        others = tuple(range(start, min(start + 1024, MAX_HASHES_PER_INSTANCE - 2)))
        held = await fleet.registry.publish_blocks("q", epochs["q"], update(others))
    assert held.held == MAX_HASHES_PER_INSTANCE
    assert await choose(fleet.registry) == ("q", 32)
    more = update((1, 50_000, 50_000), HASHES[:1])
    assert (await fleet.registry.publish_blocks("q", epochs["q"], more)).held == held.held
    assert (await fleet.registry.publish_blocks("q", epochs["q"], update((50_001,)))).held == 1
    assert await choose(fleet.registry) == ("p", 0)


async def test_hash_is_removed_only_where_it_begins(fleet):
    """The bytes of 1 and 512, side by side, contain those of 256 across the boundary."""
    epochs = await join_three(fleet)
    assert pack([256]) in pack([1, 512])
    await fleet.registry.publish_blocks("q", epochs["q"], update((1, 512)))
    assert (await fleet.registry.publish_blocks("q", epochs["q"], update((), (256,)))).held == 2
    assert await choose(fleet.registry, (1, 512)) == ("q", 32)


async def test_blocks_end_with_the_lease(fleet):
    epochs = await join_three(fleet)
    await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES))
    await fleet.registry.deregister("q", epochs["q"])
    later = await fleet.join("q")
    assert await choose(fleet.registry) == ("p", 0)
    with pytest.raises(StaleEpoch):
        await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES))
    with pytest.raises(StaleEpoch):
        await fleet.registry.publish_blocks("nobody", epochs["q"], update(HASHES))
    assert (await fleet.registry.publish_blocks("q", later.epoch, update())).held == 0


async def test_blocks_renew_no_lease_and_are_no_change(fleet):
    epochs = await join_three(fleet)
    watch = fleet.registry.watch()
    await anext(watch)
    await fleet.pass_time(4.0)
    await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES))
    await fleet.pass_time(2.0)
    assert await fleet.registry.instances() == ()
    gone = [await anext(watch) for _ in range(3)]
    assert {change.instance.state for change in gone} == {InstanceState.GONE}


async def test_transfer_keeps_the_score_of_its_pair(fleet):
    epochs = await join_three(fleet)
    await fleet.registry.heartbeat("q", epochs["q"], load=Load(running=1))
    await fleet.registry.publish_blocks("q", epochs["q"], update(HASHES))
    await fleet.registry.instances()
    request = TransferRequest(prefix_hashes=HASHES, tokens_per_hash=100, explain=True)
    opened = await open_transfer(fleet.registry, request, seconds=30, clock=fleet.clock)
    assert opened.score is not None
    assert opened.score.cost == -1.0, "one request, less half a one per 1,000 of 4,000 tokens"
    assert await fleet.registry.transfer(opened.transfer_id) == opened


async def test_released_transfer_counts_until_decode_reports_its_load(fleet):
    """Between a first token and decode's next heartbeat, requests are spread all the same."""
    await fleet.join("p")
    epochs = {name: (await fleet.join(name, Role.DECODE)).epoch for name in ("d", "e")}

    async def route() -> str:
        await fleet.registry.instances()
        request = TransferRequest(explain=True)
        opened = await open_transfer(fleet.registry, request, seconds=30, clock=fleet.clock)
        await fleet.registry.release(opened.transfer_id)
        return opened.decode.instance_id

    assert [await route() for _ in range(4)] == ["d", "e", "d", "e"]
    assert [(await fleet.registry.instance(name)).started for name in "de"] == [2, 2]
    await fleet.registry.heartbeat("e", epochs["e"], state=InstanceState.READY)
    assert (await fleet.registry.instance("e")).started == 2, "it has not reported its load"
    await fleet.registry.heartbeat("e", epochs["e"], load=Load(running=1))
    assert (await fleet.registry.instance("e")).started == 0
    assert await route() == "e"
    assert (await fleet.registry.instance("p")).started == 0


async def test_expired_transfer_does_not_count_as_started(fleet):
    await fleet.join("p")
    await fleet.join("d", Role.DECODE)
    await open_transfer(fleet.registry, TransferRequest(), seconds=1, clock=fleet.clock)
    await fleet.pass_time(2.0)
    assert (await fleet.registry.instance("d")).started == 0


@pytest.mark.native
async def test_all_registries_make_the_same_choices(empty_redis, seed):
    """Gives both the same history. A replica that loads it later agrees too."""
    source = random.Random(seed)
    clock = VirtualClock()  # no lease ends, however long it takes
    embedded = EmbeddedRegistry(clock=clock)
    async with replica(empty_redis, clock=clock) as redis:
        both: tuple[Registry, ...] = (embedded, redis)
        chains = [chain_hashes(range(n, n + 480), 16) for n in range(5)]
        epochs: dict[str, list[int]] = {}
        names = [f"w{number}" for number in range(12)]
        for number, name in enumerate(names):
            labels = {"rack": source.choice("xy"), "host": source.choice("xyz")}
            spec = worker(name, Role.DECODE if number % 3 else Role.PREFILL, labels=labels)
            leases = [await r.register(spec, state=InstanceState.READY) for r in both]
            epochs[name] = [lease.epoch for lease in leases]
        for _ in range(120):
            name = source.choice(names)
            chain = source.choice(chains)
            step = update(
                chain[: source.randrange(30)],
                tuple(source.sample(chain, 5)),
                reset=source.random() < 0.2,
            )
            load = Load(running=source.randrange(3), free_blocks=source.randrange(65))
            for registry, epoch in zip(both, epochs[name], strict=True):
                await registry.heartbeat(name, epoch, load=load)
                await registry.publish_blocks(name, epoch, step)
            if source.random() < 0.3:
                await redis.instances()
                for registry in both:
                    request = TransferRequest(prompt_tokens=10)
                    opened = await open_transfer(registry, request, seconds=600, clock=clock)
                    await registry.release(opened.transfer_id)
        requests = [
            TransferRequest(
                prompt_tokens=source.choice([None, 100]),
                prefix_hashes=source.choice(chains)[: source.randrange(30)],
                explain=True,
            )
            for _ in range(60)
        ]
        async with replica(empty_redis, clock=clock) as late:
            for registry in (redis, late):
                await registry.instances()
                for request in requests:
                    assert await choice(registry, request) == await choice(embedded, request)


async def choice(registry: Registry, request: TransferRequest) -> object:
    try:
        pair = await registry.choose(request)
    except NoCapacity as refused:
        return refused.details
    return pair.prefill.instance_id, pair.decode.instance_id, pair.score


@asynccontextmanager
async def beside(
    fleet: RegistryUnderTest, request: pytest.FixtureRequest
) -> AsyncIterator[Registry]:
    """Yields another replica of the fleet's registry, or an embedded registry itself."""
    if isinstance(fleet.registry, EmbeddedRegistry):
        yield fleet.registry
        return
    server = request.getfixturevalue("empty_redis")
    async with replica(server, clock=fleet.clock, lease=LEASE) as other:
        yield other


async def test_two_routers_never_overbook_a_worker(fleet, request, seed):
    """Both open and release random prompts at the same time; with Redis, at two replicas."""
    source = random.Random(seed)
    sizes = {f"w{n}": source.randrange(4, 40) for n in range(5)}
    for number, (name, size) in enumerate(sizes.items()):
        role = (Role.PREFILL, Role.DECODE, Role.BOTH)[number % 3]
        await fleet.join(name, role, num_blocks=size)
    outcomes: Counter[str] = Counter()

    async def route(registry: Registry, source: random.Random) -> list[Transfer]:
        mine: list[Transfer] = []
        for _ in range(40):
            if mine and source.random() < 0.3:
                done = mine.pop(source.randrange(len(mine)))
                await registry.release(done.transfer_id)
            request = TransferRequest(prompt_tokens=source.randrange(1, 3 * 16))
            try:
                opened = await open_transfer(registry, request, seconds=600, clock=fleet.clock)
            except NoCapacity:
                outcomes["refused"] += 1
                continue
            outcomes["opened"] += 1
            mine.append(opened)
            await check(registry)
        return mine

    async def check(registry: Registry) -> None:
        for instance in await registry.instances():
            assert 0 <= instance.reserved.blocks <= sizes[instance.instance_id]

    async with beside(fleet, request) as other:
        seeds = (random.Random(source.random()) for _ in range(2))
        routes = (route(r, s) for r, s in zip((fleet.registry, other), seeds, strict=True))
        held = [transfer for mine in await asyncio.gather(*routes) for transfer in mine]
        booked: Counter[str] = Counter()
        for transfer in held:
            booked[transfer.prefill.instance_id] += transfer.prefill_blocks
            booked[transfer.decode.instance_id] += transfer.decode_blocks
        instances = await other.instances()
        assert {i.instance_id: i.reserved.blocks for i in instances} == {
            name: booked[name] for name in sizes
        }
    assert outcomes["opened"] > 5
    assert outcomes["refused"] > 0
