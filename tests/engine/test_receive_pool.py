"""Two-sided sends into receive slots."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvxfer import Engine, Memory, Peer, ReceivePool, RemotePool
from kvxfer.engine.pool_wire import decode
from kvxfer.errors import (
    Backpressure,
    DeadlineExceeded,
    EngineClosed,
    InvalidArgument,
    OutOfBounds,
    OutOfMemory,
    PeerError,
    PeerLost,
    StaleCounter,
    UnknownRegion,
)
from tests.engine.conftest import Pair, Star
from verify.polling import PATIENCE, eventually

pytestmark = pytest.mark.native

SLOT = 3 << 20  # several writes


def payload(engine: Engine, data: bytes) -> Memory:
    memory = engine.alloc(max(len(data), 1))
    memoryview(memory)[: len(data)] = data
    return memory


async def next_of(pool: ReceivePool) -> tuple[Peer, bytes]:
    """Returns the next message, and releases its slot."""
    async with asyncio.timeout(PATIENCE):
        with await anext(pool) as received:
            return received.peer, bytes(received.data)


async def test_messages_of_any_length_arrive_whole_with_few_slots(
    pair: Pair, rng: random.Random
) -> None:
    lengths = [0, 1, SLOT, *(rng.randrange(SLOT) for _ in range(17))]
    rng.shuffle(lengths)
    data = rng.randbytes(SLOT)
    source = payload(pair.writer, data)
    with ReceivePool(pair.reader, slots=3, slot_bytes=SLOT) as pool:
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=3))
        assert (pool.free, remote.free, remote.slot_bytes) == (0, 3, SLOT)
        starts = [rng.randrange(SLOT - length + 1) for length in lengths]

        async def send() -> None:
            for start, length in zip(starts, lengths, strict=True):
                await remote.available(PATIENCE)
                sent = remote.send(source.region, length, start)
                assert sent.nbytes >= length

        sending = asyncio.create_task(send())
        received = [await next_of(pool) for _ in lengths]
        await sending
        assert {peer for peer, _ in received} == {pair.to_writer}
        sent = [data[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        assert sorted(each for _, each in received) == sorted(sent)
        await eventually(lambda: remote.free == 3)


async def test_a_slot_is_not_written_to_until_it_is_released(pair: Pair) -> None:
    first, second = payload(pair.writer, b"first"), payload(pair.writer, b"second")
    with ReceivePool(pair.reader, slots=1, slot_bytes=64) as pool:
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=1))
        await remote.send(first.region, 5)
        with pytest.raises(Backpressure, match="none of the 1 slots of peer 'reader'"):
            remote.send(second.region, 6)
        with pytest.raises(DeadlineExceeded, match="no slot"):
            await remote.available(timeout=0.01)
        received = await anext(pool)
        assert bytes(received.data) == b"first"
        assert remote.free == 0
        received.release()
        received.release()
        with pytest.raises(ValueError, match="released memoryview"):
            received.data.tobytes()
        await remote.available(PATIENCE)
        assert remote.free == 1
        await remote.send(second.region, 6)
        assert (await next_of(pool))[1] == b"second"


async def test_pools_do_not_disturb_messages(pair: Pair) -> None:
    with ReceivePool(pair.reader, slots=2, slot_bytes=64) as pool:
        pair.to_writer.send(pool.offer(pair.to_writer, slots=2))
        remote = RemotePool(pair.to_reader, await pair.to_reader.receive(PATIENCE))
        await remote.send(payload(pair.writer, b"in a slot").region, 9)
        pair.to_reader.send(b"a message")
        assert (await next_of(pool))[1] == b"in a slot"
        assert await pair.to_writer.receive(PATIENCE) == b"a message"


async def test_a_pool_serves_many_peers_and_names_the_sender(star: Star) -> None:
    with ReceivePool(star.hub, slots=6, slot_bytes=64) as pool:
        remotes = [
            RemotePool(to_hub, pool.offer(to_reader, slots=2))
            for to_hub, to_reader in zip(star.to_hub, star.to_readers, strict=True)
        ]
        with pytest.raises(OutOfMemory, match="0 are free"):
            pool.offer(star.to_readers[0], slots=1)
        for n, (remote, reader) in enumerate(zip(remotes, star.readers, strict=True)):
            for _ in range(2):
                remote.send(payload(reader, b"%d" % n).region, 1)
        received = [await next_of(pool) for _ in range(6)]
        expected = [(peer, b"%d" % n) for n, peer in enumerate(star.to_readers) for _ in range(2)]
        assert sorted(received, key=lambda each: each[1]) == expected


async def test_a_lost_peers_slots_come_back_and_its_whole_messages_are_still_yielded(
    pair: Pair,
) -> None:
    with ReceivePool(pair.reader, slots=4, slot_bytes=64) as pool:
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=4))
        await remote.send(payload(pair.writer, b"held").region, 4)
        held = await anext(pool)
        watcher = pair.writer.watcher()
        never = remote.send(payload(pair.writer, b"held back").region, 9, after=watcher.at(1))
        await remote.send(payload(pair.writer, b"whole").region, 5)
        await eventually(lambda: pool._arrived.qsize() == 1)
        await pair.writer.close()
        with pytest.raises(EngineClosed):
            await never
        with pytest.raises(PeerLost):
            await pair.to_writer.receive(PATIENCE)
        assert pool.free == 2
        assert bytes(held.data) == b"held"
        held.release()
        assert pool.free == 3
        assert await next_of(pool) == (pair.to_writer, b"whole")
        assert pool.free == 4
        with pytest.raises(PeerLost):
            pool.offer(pair.to_writer, slots=1)
        with pytest.raises(EngineClosed):
            remote.send(payload(pair.reader, b"x").region, 1)


async def test_the_loss_of_the_receiver_ends_a_wait_for_a_slot(pair: Pair) -> None:
    pool = ReceivePool(pair.reader, slots=1, slot_bytes=64)
    remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=1))
    await remote.send(payload(pair.writer, b"x").region, 1)
    waiting = asyncio.create_task(remote.available())
    receiving = asyncio.create_task(next_of(pool))
    assert (await receiving)[1] == b"x"
    await waiting
    await remote.send(payload(pair.writer, b"y").region, 1)
    waiting = asyncio.create_task(remote.available())
    await pair.reader.close()
    with pytest.raises(PeerLost):
        await waiting
    assert (await next_of(pool))[1] == b"y"
    with pytest.raises(EngineClosed):
        await anext(pool)


async def test_withdrawn_slots_refuse_their_sender_and_are_lent_again(pair: Pair) -> None:
    source = payload(pair.writer, b"x")
    with ReceivePool(pair.reader, slots=2, slot_bytes=64) as pool:
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=2))
        pool.withdraw(pair.to_writer)
        await eventually(lambda: pool.free == 2)
        for _ in range(2):
            with pytest.raises(StaleCounter):
                await remote.send(source.region, 1)
        with pytest.raises(Backpressure, match="failed sends have cost all slots"):
            await remote.available()
        again = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=2))
        await again.send(source.region, 1)
        assert (await next_of(pool))[1] == b"x"


async def test_a_failed_send_costs_its_slot_and_yields_nothing(pair: Pair) -> None:
    source = payload(pair.writer, b"abc")
    watcher = pair.writer.watcher()
    with ReceivePool(pair.reader, slots=2, slot_bytes=64) as pool:
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=2))
        with pytest.raises(DeadlineExceeded):
            await remote.send(source.region, 3, timeout=0.01, after=watcher.at(1))
        assert remote.free == 1
        watcher.add()
        await remote.send(source.region, 2)
        assert (await next_of(pool))[1] == b"ab"
        await remote.available(PATIENCE)
        assert (remote.free, pool.free) == (1, 0)
        pool.withdraw(pair.to_writer)
        await eventually(lambda: pool.free == 2)


async def test_a_sender_that_breaks_the_rules_of_its_slots_is_disconnected(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with ReceivePool(pair.reader, slots=1, slot_bytes=64) as pool:
        offer = decode(pool.offer(pair.to_writer, slots=1))
        header = payload(pair.writer, (1 << 40).to_bytes(8, "little") + bytes(8))
        pair.to_reader.write(
            header.region,
            offer.region,
            length=16,
            dst_offset=offer.slots[0].offset,
            imm=offer.slots[0].header_imm,
        )
        with pytest.raises(PeerError):
            await pair.to_reader.receive(PATIENCE)
        await eventually(lambda: pool.free == 1)
        assert "breaks the rules of its receive slots" in caplog.text


async def test_closing_a_pool_ends_its_iteration(pair: Pair) -> None:
    pool = ReceivePool(pair.reader, slots=2, slot_bytes=64)
    remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=2))
    await remote.send(payload(pair.writer, b"x").region, 1)
    await eventually(lambda: pool._arrived.qsize() == 1)
    pool.close()
    pool.close()
    assert [bytes(received.data) async for received in pool] == [b"x"]
    assert [received async for received in pool] == []
    with pytest.raises(InvalidArgument, match="closed"):
        pool.offer(pair.to_writer, slots=1)
    with pytest.raises((StaleCounter, UnknownRegion, PeerError)):
        await remote.send(payload(pair.writer, b"y").region, 1)
    remote.close()
    remote.close()
    with pytest.raises(InvalidArgument, match="closed"):
        remote.send(payload(pair.writer, b"y").region, 1)
    with pytest.raises(InvalidArgument, match="closed"):
        await remote.available()


async def test_invalid_arguments_are_refused(pair: Pair) -> None:
    with pytest.raises(InvalidArgument, match="slots is 0; pass an int from 1 to 65536"):
        ReceivePool(pair.reader, 0, 1)
    with pytest.raises(InvalidArgument, match="slot_bytes is 0; pass an int of at least 1"):
        ReceivePool(pair.reader, 1, 0)
    with ReceivePool(pair.reader, slots=2, slot_bytes=100) as pool:
        for wrong in (0, -1):
            with pytest.raises(InvalidArgument, match=f"slots is {wrong}; pass an int from 1"):
                pool.offer(pair.to_writer, slots=wrong)
        with pytest.raises(OutOfMemory, match="3 slots for peer 'writer'; 2 are free"):
            pool.offer(pair.to_writer, slots=3)
        with pytest.raises(InvalidArgument, match="another engine"):
            pool.offer(pair.to_reader, slots=1)
        with pytest.raises(InvalidArgument, match="not the bytes of"):
            RemotePool(pair.to_reader, b"garbage")
        remote = RemotePool(pair.to_reader, pool.offer(pair.to_writer, slots=2))
        source = pair.writer.alloc(4096)
        with pytest.raises(OutOfBounds, match="length is 101; the slots have 100 bytes"):
            remote.send(source.region, 101)
        with pytest.raises(OutOfBounds):
            remote.send(source.region, 100, 4096)
        assert remote.free == 2  # refused sends cost nothing
