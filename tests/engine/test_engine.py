"""The engine as Python programs use it."""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import threading
import weakref
from types import ModuleType

import numpy as np
import pytest

from kvxfer import Engine, Operation, Peer, alloc_shared
from kvxfer.errors import (
    AddressInUse,
    AuthenticationFailed,
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    FabricUnavailable,
    InvalidArgument,
    OutOfBounds,
    OutOfMemory,
    PeerError,
    PeerLost,
    PeerRestarted,
    StaleCounter,
    UnknownRegion,
)
from tests.engine.conftest import KEY, Pair, bytes_of
from verify.polling import PATIENCE, eventually

pytestmark = pytest.mark.native


async def test_a_list_of_writes_is_one_operation_with_one_total(
    pair: Pair, rng: random.Random
) -> None:
    size = 64 << 10
    sources = [pair.writer.alloc(size) for _ in range(2)]
    targets = [pair.reader.alloc(size) for _ in range(2)]
    for source in sources:
        bytes_of(source)[:] = np.frombuffer(rng.randbytes(size), dtype=np.uint8)
    counter = pair.reader.counter()
    lengths = [rng.randrange(1, 4096) for _ in range(16)]
    src_offsets = [rng.randrange(size - length) for length in lengths]
    dst_offsets = [at * 4096 for at in range(16)]
    operation = pair.to_reader.write_list(
        [sources[at % 2].region for at in range(16)],
        [targets[at // 8].region.descriptor for at in range(16)],
        src_offsets=src_offsets,
        dst_offsets=dst_offsets,
        lengths=np.array(lengths),
        imm=counter.imm,
    )
    assert (operation.writes, operation.nbytes) == (16, sum(lengths))
    await counter.wait(operation.immediates, timeout=PATIENCE)
    await operation
    for at in range(16):
        there = bytes_of(targets[at // 8])[dst_offsets[at] :][: lengths[at]]
        sent = bytes_of(sources[at % 2])[src_offsets[at] :][: lengths[at]]
        assert np.array_equal(there, sent)


async def test_a_list_with_a_bad_write_is_refused_whole(pair: Pair) -> None:
    source, target = pair.writer.alloc(4096), pair.reader.alloc(4096)

    def write(src_offsets: list[int], lengths: list[int]) -> Operation:
        return pair.to_reader.write_list(
            [source.region] * 2,
            [target.region.descriptor] * 2,
            src_offsets=src_offsets,
            dst_offsets=[0, 0],
            lengths=lengths,
        )

    with pytest.raises(OutOfBounds, match="write 1 of the list"):
        write([0, 4096], [1, 1])
    with pytest.raises(OutOfBounds, match=r"the list has a negative .* position 0"):
        write([-1, 0], [1, 1])
    with pytest.raises(InvalidArgument, match="2 sources"):
        write([0, 0], [1])
    assert pair.writer.stats()["writes_posted"] == 0


async def test_scattered_pages_arrive_and_the_counter_shows_the_announced_total(
    pair: Pair, rng: random.Random
) -> None:
    random_pages = np.random.default_rng(rng.getrandbits(32))
    page, count = 4096, 500
    source = pair.writer.alloc(page * 1000)
    target = pair.reader.alloc(page * 1000)
    src = bytes_of(source).reshape(1000, page)
    src[:] = random_pages.integers(0, 256, src.shape, dtype=np.uint8)
    from_pages = random_pages.permutation(1000)[:count]
    to_pages = random_pages.permutation(1000)[:count].astype(np.int32)
    counter = pair.reader.counter()
    write = pair.to_reader.write_pages(
        source.region,
        target.region.descriptor,
        page_length=page,
        src_pages=from_pages,
        dst_pages=to_pages,
        src_stride=page,
        dst_stride=page,
        imm=counter.imm,
    )
    assert write.nbytes == page * count
    await counter.wait(write.immediates, timeout=PATIENCE)
    await write
    expected = np.zeros_like(src)
    expected[to_pages] = src[from_pages]
    assert np.array_equal(bytes_of(target).reshape(1000, page), expected)
    assert counter.completed_at_ns is not None


async def test_registered_arrays_are_sources_and_targets(pair: Pair) -> None:
    array = np.arange(1000, dtype=np.int64)
    target = np.zeros(1000, dtype=np.int64)
    source = pair.writer.register(array)
    await pair.to_reader.write(source, pair.reader.register(target).descriptor, length=8000)
    assert np.array_equal(target, array)


async def test_memory_reports_which_nics_reach_it_and_can_require_them(pair: Pair) -> None:
    engine = pair.writer
    by_nics = ("host",) * len(engine.nics)
    array = np.zeros(4096, np.uint8)
    assert engine.alloc(4096).region.nics == engine.register(array).nics == by_nics
    if engine.nics:
        assert engine.alloc(4096, require_nics=True).region.nics == by_nics
        return
    for make in (engine.alloc, engine.register):
        with pytest.raises(FabricUnavailable, match="this engine has none"):
            make(4096 if make == engine.alloc else array, require_nics=True)


async def test_memory_is_read_and_written_by_its_owner(pair: Pair) -> None:
    region = pair.writer.alloc(4096).region
    region.write(b"abcdef", 10)
    seen = bytearray(8)
    region.read(seen, 9)
    assert seen == b"\0abcdef\0"
    for move in (region.read, region.write):
        with pytest.raises(OutOfBounds, match="8 bytes from 4089 leave the region of 4096 bytes"):
            move(seen, 4089)
        with pytest.raises(InvalidArgument, match=r"is array.*; pass a contiguous buffer"):
            move(np.zeros(8, np.uint8)[::2])
    region.close()
    with pytest.raises(UnknownRegion, match="was closed"):
        region.read(seen)


async def test_registered_tensors_are_targets(pair: Pair, torch: ModuleType) -> None:
    array = np.arange(1000, dtype=np.int64)
    tensor = torch.zeros(1000, dtype=torch.int64)
    source = pair.writer.register(array)
    target = pair.reader.register(tensor)
    await pair.to_reader.write(source, target.descriptor, length=8000)
    assert tensor.tolist() == list(range(1000))
    raw = pair.reader.register(tensor.data_ptr(), 4000)
    assert (raw.address, raw.nbytes) == (tensor.data_ptr(), 4000)


def test_alloc_gives_buffer_protocol_and_dlpack(torch: ModuleType) -> None:
    engine = Engine(cluster_key=KEY)
    memory = engine.alloc(4096)
    memoryview(memory)[7] = 9
    assert np.from_dlpack(memory)[7] == 9
    tensor = torch.from_dlpack(memory)
    tensor[8] = 5
    assert bytes_of(memory)[8] == 5
    memory.close()
    engine.native.close()
    del memory, engine
    assert int(tensor[8]) == 5  # the view keeps the memory alive


async def test_parts_of_shared_memory_are_registered_by_any_engine(
    pair: Pair, rng: random.Random
) -> None:
    memory = np.frombuffer(alloc_shared(3 << 20), dtype=np.uint8)
    assert not memory.any()
    source, target = memory[5000 : 5000 + (1 << 20)], memory[2 << 20 :]
    memory[:] = np.frombuffer(rng.randbytes(memory.nbytes), dtype=np.uint8)
    before = memory.copy()
    here, there = pair.writer.register(source), pair.reader.register(target)
    assert here.handle.shareable and there.handle.shareable
    assert not pair.writer.register(np.zeros(4096, dtype=np.uint8)).handle.shareable
    counter = pair.reader.counter()
    write = pair.to_reader.write(here, there.descriptor, length=source.nbytes, imm=counter.imm)
    await counter.wait(write.immediates, timeout=PATIENCE)
    before[2 << 20 :] = source
    assert np.array_equal(memory, before)
    with pytest.raises(InvalidArgument, match="nbytes is 0; pass an int of at least 1"):
        alloc_shared(0)
    with pytest.raises(OutOfMemory, match="bytes of memory available"):
        alloc_shared(1 << 46)


async def test_writes_may_be_submitted_from_any_thread(pair: Pair) -> None:
    source, target = pair.writer.alloc(1 << 16), pair.reader.alloc(1 << 16)
    counter = pair.reader.counter()
    operations: list[Operation] = []

    def submit() -> None:
        operations.extend(
            pair.to_reader.write(
                source.region, target.region.descriptor, length=100, imm=counter.imm
            )
            for _ in range(200)
        )

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await counter.wait(800, timeout=PATIENCE)
    await asyncio.gather(*(asyncio.wait_for(op, PATIENCE) for op in operations))
    assert all(op.done() for op in operations)


async def test_messages_arrive_in_order(pair: Pair) -> None:
    for i in range(100):
        pair.to_reader.send(b"%d" % i)
    received = [await pair.to_writer.receive(PATIENCE) for _ in range(100)]
    assert received == [b"%d" % i for i in range(100)]
    with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
        await pair.to_writer.receive(0.01)


async def test_a_handler_gets_peers_and_messages() -> None:
    heard: list[object] = []
    lost = asyncio.Event()

    class Handler:
        def peer_up(self, peer: Peer) -> None:
            heard.append(("up", peer.name))

        def message(self, peer: Peer, data: bytes) -> None:
            heard.append(("message", data))

        def peer_lost(self, peer: Peer, error: PeerError) -> None:
            heard.append(("lost", error.code))
            lost.set()

    async with Engine(cluster_key=KEY, name="server", peer_timeout=PATIENCE) as server:
        server.handler = Handler()
        async with Engine(cluster_key=KEY, name="client", peer_timeout=PATIENCE) as client:
            peer = await client.connect(server.address, PATIENCE)
            peer.send(b"hello")
        async with asyncio.timeout(PATIENCE):
            await lost.wait()
    assert heard == [("up", "client"), ("message", b"hello"), ("lost", "peer-lost")]


async def test_a_failing_handler_loses_no_completion(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    told = asyncio.Event()

    class Handler:
        def peer_up(self, peer: Peer) -> None: ...

        def message(self, peer: Peer, data: bytes) -> None:
            told.set()
            raise RuntimeError("a bug of the handler")

        def peer_lost(self, peer: Peer, error: PeerError) -> None: ...

    pair.reader.handler = Handler()
    counter = pair.reader.counter()
    pair.to_reader.send(b"x")
    await pair.to_reader.write_imm(counter.imm)
    await counter.wait(1, timeout=PATIENCE)
    async with asyncio.timeout(PATIENCE):
        await told.wait()
    assert "a bug of the handler" in caplog.text


async def test_bad_writes_are_refused_before_or_at_the_receiver_by_name(pair: Pair) -> None:
    source, target = pair.writer.alloc(8192), pair.reader.alloc(8192)
    ok = np.array([0, 1])

    def write_pages(src: object, dst: object) -> object:
        return pair.to_reader.write_pages(
            source.region,
            target.region.descriptor,
            page_length=4096,
            src_pages=src,
            dst_pages=dst,
            src_stride=4096,
            dst_stride=4096,
        )

    with pytest.raises(OutOfBounds, match=r"source page 2 \(position 1"):
        write_pages(np.array([0, 2]), ok)
    with pytest.raises(OutOfBounds, match="destination page -1"):
        write_pages(ok, np.array([0, -1]))
    with pytest.raises(InvalidArgument, match="2 source pages, 1 destination pages"):
        write_pages(ok, ok[:1])
    with pytest.raises(InvalidArgument, match=r"src_pages is array\(\[0.5\]\); pass integers"):
        write_pages(np.array([0.5]), ok)
    with pytest.raises(InvalidArgument, match=r"dst_pages is \[0, '1'\]; pass integers"):
        write_pages(ok, [0, "1"])
    with pytest.raises(OutOfBounds, match="src_pages has 18446744073709551615 at position 0"):
        write_pages(np.array([2**64 - 1], np.uint64), [0])
    with pytest.raises(OutOfBounds, match="leaves the region of 8192 bytes"):
        pair.to_reader.write(source.region, target.region.descriptor, length=8193)
    with pytest.raises(InvalidArgument, match=r"dst is b'garbage'; pass the bytes of"):
        pair.to_reader.write(source.region, b"garbage", length=1)
    with pytest.raises(UnknownRegion, match="belongs to engine"):
        pair.to_reader.write(source.region, source.region.descriptor, length=1)
    stale = pair.reader.alloc(4096)
    stale.close()
    with pytest.raises(UnknownRegion, match="the region was deregistered"):
        await pair.to_reader.write(source.region, stale.region.descriptor, length=1)
    counter = pair.reader.counter()
    counter.release()
    with pytest.raises(StaleCounter, match="'reader'"):
        await pair.to_reader.write(
            source.region, target.region.descriptor, length=1, imm=counter.imm
        )


async def test_a_wait_has_a_deadline_and_ends_when_the_counter_is_released(pair: Pair) -> None:
    counter = pair.reader.counter()
    with pytest.raises(DeadlineExceeded, match="stands at 0 of 3"):
        await counter.wait(3, timeout=0.01)
    waiting = asyncio.create_task(counter.wait(3))
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="already"):
        await counter.wait(3)
    counter.release()
    with pytest.raises(StaleCounter):
        await waiting
    with pytest.raises(StaleCounter):
        await counter.wait(3)
    counter = pair.reader.counter()
    await pair.to_reader.write_imm(counter.imm)
    await pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: counter.value == 2)
    with pytest.raises(EngineError, match="1 were waited for"):
        await counter.wait(1, timeout=PATIENCE)


async def test_cancelling_an_operation_ends_it(pair: Pair) -> None:
    size = 32 << 20
    source, target = pair.writer.alloc(size), pair.reader.alloc(size)
    writes = [
        pair.to_reader.write(source.region, target.region.descriptor, length=size)
        for _ in range(20)
    ]
    # This one is still under way, however fast those are.
    after = pair.writer.watcher().at(1)
    writes.append(
        pair.to_reader.write(source.region, target.region.descriptor, length=size, after=after)
    )
    for write in writes:
        write.cancel()
    with pytest.raises(Cancelled):
        await writes[-1]


async def test_a_lost_peer_is_named_and_unknown_afterwards(pair: Pair) -> None:
    size = 64 << 20
    source, target = pair.writer.alloc(size), pair.reader.alloc(size)
    writes = [
        pair.to_reader.write(source.region, target.region.descriptor, length=size)
        for _ in range(20)
    ]
    # This one is still under way, however fast those are.
    after = pair.writer.watcher().at(1)
    writes.append(
        pair.to_reader.write(source.region, target.region.descriptor, length=size, after=after)
    )
    await eventually(lambda: pair.writer.stats()["writes_posted"] > 0)
    await pair.reader.close()
    with pytest.raises(PeerLost, match="'reader'"):
        await writes[-1]
    with pytest.raises(PeerLost):
        await pair.to_reader.receive(PATIENCE)
    assert not pair.to_reader.alive
    with pytest.raises(PeerLost):
        pair.to_reader.send(b"x")
    with pytest.raises(PeerLost):
        pair.to_reader.write_imm(1)
    pair.to_reader.close()


async def test_connecting_fails_by_name() -> None:
    async with Engine(cluster_key=KEY) as engine:
        async with Engine(cluster_key="some other cluster key") as stranger:
            with pytest.raises(AuthenticationFailed, match="cluster key"):
                await engine.connect(stranger.address, PATIENCE)
        with pytest.raises(ConnectFailed, match="refused"):
            await engine.connect(stranger.address, PATIENCE)
        async with Engine(cluster_key=KEY, port=int(stranger.address.split(":")[2].split("/")[0])):
            with pytest.raises(PeerRestarted):
                await engine.connect(stranger.address, PATIENCE)
        with pytest.raises(InvalidArgument, match="kvx://HOST:PORT/ENGINE_ID"):
            await engine.connect("http://nowhere")


async def test_bad_options_and_a_port_in_use_are_named() -> None:
    with pytest.raises(InvalidArgument, match="5 bytes; it needs at least 16"):
        Engine(cluster_key="short")
    with pytest.raises(InvalidArgument, match="infiniband"):
        Engine(cluster_key=KEY, fabrics=["infiniband"])
    with pytest.raises(InvalidArgument, match="peer_timeout"):
        Engine(cluster_key=KEY, peer_timeout=0.1)
    with pytest.raises(InvalidArgument, match="traffic_class is 256; use 0 to 255"):
        Engine(cluster_key=KEY, traffic_class=256)
    with pytest.raises(InvalidArgument, match=r"tuning\.service_level is -1; use 0 to 7"):
        Engine(cluster_key=KEY, tuning={"service_level": -1})
    async with Engine(cluster_key=KEY) as engine:
        port = int(engine.address.split(":")[2].split("/")[0])
        with pytest.raises(AddressInUse, match=f"port {port}"):
            Engine(cluster_key=KEY, port=port)


async def test_unregistrable_memory_is_named() -> None:
    async with Engine(cluster_key=KEY) as engine:
        with pytest.raises(InvalidArgument, match="bytes cannot be registered"):
            engine.register(b"read-only")
        with pytest.raises(InvalidArgument, match="contiguous"):
            engine.register(np.zeros((4, 4))[:, ::2])
        with pytest.raises(InvalidArgument, match="cannot register a dict"):
            engine.register({})
        with pytest.raises(InvalidArgument, match="needs nbytes"):
            engine.register(1 << 40)
        with pytest.raises(InvalidArgument, match="nbytes is 0; pass an int of at least 1"):
            engine.alloc(0)


async def test_a_closed_engine_refuses_by_name() -> None:
    engine = Engine(cluster_key=KEY)
    async with engine:
        region = engine.alloc(4096)
    with pytest.raises(EngineClosed):
        await engine.connect("kvx://127.0.0.1:1/" + "0" * 32)
    region.close()
    await engine.close()


async def test_memory_cannot_be_a_source_once_its_region_is_closed(pair: Pair) -> None:
    array = np.ones(4096, dtype=np.uint8)
    source, target = pair.writer.register(array), pair.reader.alloc(4096)
    source.close()
    with pytest.raises(UnknownRegion, match="source region"):
        await pair.to_reader.write(source, target.region.descriptor, length=4096)
    assert not bytes_of(target).any()
    other = pair.writer.alloc(4096).region  # the peer is still connected
    await pair.to_reader.write(other, target.region.descriptor, length=1)


async def test_registered_memory_lives_until_its_region_is_closed() -> None:
    async with Engine(cluster_key=KEY) as engine:
        array = np.zeros(4096, dtype=np.uint8)
        gone = weakref.ref(array)
        descriptor = engine.register(array).descriptor  # no reference to the region is kept
        del array
        gc.collect()
        assert gone() is not None
        assert descriptor
        buffer = bytearray(4096)
        region = engine.register(buffer)
        with pytest.raises(BufferError):
            buffer.extend(b"x")  # it would move
        region.close()
        buffer.extend(b"x")


async def test_closing_the_engine_ends_every_wait() -> None:
    async with Engine(cluster_key=KEY) as engine:
        counter = engine.counter()
        waiting = asyncio.create_task(counter.wait(1))
        await asyncio.sleep(0)
        await asyncio.gather(engine.close(), engine.close())
        with pytest.raises(EngineClosed):
            await waiting
        with pytest.raises(EngineClosed):
            engine.counter()


async def test_a_wait_that_was_given_up_does_not_end_the_next(pair: Pair) -> None:
    counter = pair.reader.counter()
    with pytest.raises(DeadlineExceeded):
        await counter.wait(1, timeout=0.001)
    await pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: counter.value == 1)
    with pytest.raises(DeadlineExceeded, match="stands at 1 of 2"):
        await counter.wait(2, timeout=0.05)


async def test_each_connect_has_its_own_deadline() -> None:
    listener = socket.create_server(("127.0.0.1", 0))  # accepts and never answers
    address = f"kvx://127.0.0.1:{listener.getsockname()[1]}/" + "a" * 32
    async with Engine(cluster_key=KEY) as engine:
        patient = asyncio.create_task(engine.connect(address, timeout=60))
        await asyncio.sleep(0)
        with pytest.raises(ConnectFailed):
            await engine.connect(address, timeout=0.05)
        assert not patient.done()
    with pytest.raises(EngineClosed):
        await patient
    listener.close()
