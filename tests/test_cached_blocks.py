"""A worker reports its prefix cache, and the control plane ends up with all of it."""

from __future__ import annotations

import random

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client import Registration
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.prefix_hashes import chain_hashes, pack
from kvxfer.scheduler.prefix_index import PrefixIndex
from kvxfer.scheduler.sent_prompts import SentPrompts
from kvxfer.transfers import TransferRequest
from tests.virtual_time import passes
from verify.processes.control_plane import worker

HASHES = chain_hashes(range(160), 16)


def test_a_registration_gets_only_changes_and_the_next_one_gets_everything():
    cached = CachedBlocks()
    cached.add([1, 2, 3])
    assert cached.take(7) == BlockUpdate(added=(1, 2, 3), reset=True)
    assert cached.take(7) is None
    cached.add([4, 1])
    cached.remove([2, 4])
    assert cached.take(7) == BlockUpdate(removed=(2,)), "4 came and went, 1 is known"
    assert cached.take(8) == BlockUpdate(added=(3, 1), reset=True)


def test_all_blocks_are_sent_again_after_a_lost_update():
    cached = CachedBlocks()
    cached.add([1, 2])
    cached.take(7)
    cached.remove([1])
    cached.take(7)
    cached.lost()
    assert cached.take(7) == BlockUpdate(added=(2,), reset=True)


def test_the_newest_blocks_are_sent_and_no_more_than_the_control_plane_keeps():
    cached = CachedBlocks(limit=3000)
    cached.add(range(5000))
    assert cached.take(7) == BlockUpdate(added=tuple(range(5000 - 1024, 5000)), reset=True)
    assert cached.take(7) is None, "an old control plane keeps 1,024"
    cached.kept(32768)
    cached.add(range(5000, 8000))
    assert cached.take(7) == BlockUpdate(
        added=tuple(range(8000 - 1024, 8000)), removed=tuple(range(5000 - 1024, 5000))
    )
    assert cached.take(7) == BlockUpdate(added=tuple(range(8000 - 2048, 8000 - 1024)))
    assert cached.take(7) == BlockUpdate(added=tuple(range(5000, 8000 - 2048)))
    assert cached.take(7) is None
    cached.kept(10)
    assert cached.take(7) == BlockUpdate(removed=tuple(range(5000, 5000 + 1024)))


def test_control_plane_has_what_the_worker_has_after_any_history(seed):
    source = random.Random(seed)
    cached, index, epoch = CachedBlocks(1500), PrefixIndex(), 1
    cached.kept(32768)
    mirror = dict[int, None]()
    for _ in range(300):
        added, removed = (source.sample(range(9000), source.randrange(most)) for most in (600, 60))
        cached.add(added)
        cached.remove(removed)
        for number in added:
            mirror.pop(number, None)
            mirror[number] = None
        mirror = dict.fromkeys(list(mirror)[-1500:])
        for number in removed:
            mirror.pop(number, None)
        if source.random() < 0.1:
            epoch += 1
        update = cached.take(epoch)
        if update is None:
            continue
        if source.random() < 0.1:
            cached.lost()
            continue
        index.publish("p", pack(update.added), pack(update.removed), reset=update.reset)
    while (update := cached.take(epoch)) is not None:
        index.publish("p", pack(update.added), pack(update.removed), reset=update.reset)
    levels = index.levels(range(9000), SentPrompts())
    assert {level.depth - 1 for level in levels if index.holders(level)} == set(mirror)


async def test_registration_publishes_with_its_heartbeats(network, clock):
    cached = CachedBlocks()
    async with (
        network.control_plane(lease_seconds=60) as registry,
        network.client() as client,
        Registration(client, worker("q"), cached=cached, clock=clock) as registration,
    ):
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            await client.register(worker(name, role), state=InstanceState.READY)

        async def chosen() -> tuple[str, int]:
            pair = await registry.choose(TransferRequest(prefix_hashes=HASHES))
            return pair.prefill.instance_id, pair.cached_tokens

        assert await chosen() == ("p", 0)
        cached.add(HASHES)
        assert await chosen() == ("p", 0)
        await passes(20)
        assert await chosen() == ("q", 160)
        cached.remove(HASHES[4:])
        await registration.heartbeat()
        assert await chosen() == ("q", 64)
        await client.deregister("q", registration.epoch)
        await registration.heartbeat()
        assert await chosen() == ("q", 64), "the new registration gets everything"


async def test_blocks_of_an_update_that_did_not_arrive_are_sent_again(network, clock, monkeypatch):
    cached = CachedBlocks()
    async with (
        network.control_plane(lease_seconds=60) as registry,
        network.client() as client,
        Registration(client, worker("q"), cached=cached, clock=clock) as registration,
    ):
        cached.add(HASHES[:2])
        await registration.heartbeat()

        async def away(*_: object) -> None:
            raise ControlPlaneUnavailable("away")

        with monkeypatch.context() as patched:
            patched.setattr(registry, "publish_blocks", away)
            cached.add(HASHES[2:4])
            await registration.heartbeat()
            assert registration.registered
        await registration.heartbeat()
        await client.register(worker("d", Role.DECODE), state=InstanceState.READY)
        pair = await registry.choose(TransferRequest(prefix_hashes=HASHES))
        assert pair.cached_tokens == 64
