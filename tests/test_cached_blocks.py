"""What a worker tells of its prefix cache, and that the control plane ends up with all of it."""

from __future__ import annotations

import random

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client import Registration
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import BlockUpdate, InstanceState, Role
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, chain_hashes, pack, unpack
from kvxfer.scheduler.prefix_index import merged
from kvxfer.transfers import TransferRequest
from tests.virtual_time import passes
from verify.control_plane import worker

HASHES = chain_hashes(range(160), 16)


def test_only_news_are_told_to_one_registration_and_all_to_the_next():
    cached = CachedBlocks()
    cached.add([1, 2, 3])
    assert cached.take(7) == BlockUpdate(added=(1, 2, 3), reset=True)
    assert cached.take(7) is None
    cached.add([4, 1])
    cached.remove([2, 4])
    assert cached.take(7) == BlockUpdate(added=(1,), removed=(2, 4))
    assert cached.take(8) == BlockUpdate(added=(3, 1), reset=True)


def test_all_is_told_after_an_update_was_lost():
    cached = CachedBlocks()
    cached.add([1, 2])
    cached.take(7)
    cached.remove([1])
    cached.take(7)
    cached.lost()
    assert cached.take(7) == BlockUpdate(added=(2,), reset=True)


def test_what_is_to_be_told_stays_bounded_however_long_nobody_asks():
    cached = CachedBlocks()
    cached.add([1])
    cached.take(7)
    cached.add(range(5000))
    cached.remove(range(3000))
    assert cached.take(7) == BlockUpdate(
        added=tuple(range(5000 - MAX_HASHES_PER_INSTANCE, 5000)), reset=True
    )


def test_control_plane_has_what_the_worker_has_after_any_history(seed):
    source = random.Random(seed)
    cached, there, epoch = CachedBlocks(), b"", 1
    for _ in range(300):
        cached.add(source.sample(range(2000), source.randrange(60)))
        cached.remove(source.sample(range(2000), source.randrange(60)))
        if source.random() < 0.1:
            epoch, there = epoch + 1, b""
        update = cached.take(epoch)
        if update is None:
            continue
        if source.random() < 0.1:
            cached.lost()
            continue
        there = merged(there, pack(update.added), pack(update.removed), reset=update.reset)
    cached.lost()
    last = cached.take(epoch)
    assert last is not None
    kept = merged(there, pack(last.added), b"", reset=True)
    assert unpack(kept) == last.added


async def test_registration_publishes_with_its_heartbeats(network, clock):
    cached = CachedBlocks()
    async with (
        network.control_plane(lease_seconds=60),
        network.client() as client,
        Registration(client, worker("q"), cached=cached, clock=clock) as registration,
    ):
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            await client.register(worker(name, role), state=InstanceState.READY)

        async def opened() -> tuple[str, int]:
            transfer = await client.open_transfer(prefix_hashes=HASHES, explain=True)
            await client.release_transfer(transfer.transfer_id)
            assert transfer.score is not None
            return transfer.prefill.instance_id, transfer.score.prefix_tokens

        assert await opened() == ("p", 0)
        cached.add(HASHES)
        assert await opened() == ("p", 0)
        await passes(20)
        assert await opened() == ("q", 160)
        cached.remove(HASHES[4:])
        await registration.heartbeat()
        assert await opened() == ("q", 64)
        await client.deregister("q", registration.epoch)
        await registration.heartbeat()
        assert await opened() == ("q", 64), "all is told to the new registration"


async def test_update_that_did_not_arrive_is_made_up_for(network, clock, monkeypatch):
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
        pair = await registry.choose(TransferRequest(prefix_hashes=HASHES, explain=True))
        assert pair.score is not None
        assert pair.score.prefix_tokens == 64
