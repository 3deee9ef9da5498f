"""A case of GPU memory as Python programs move it: `python -m tests.engine.gpu_transfers CASE
FABRIC`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import random
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from cuda.bindings import driver

from kvxfer import CounterMirror, Engine, Memory, MemoryRegion, Peer, StreamWait, _native
from kvxfer.doctor.loopback import Verdict, loopback
from kvxfer.errors import (
    DeadlineExceeded,
    GpuLost,
    InvalidArgument,
    PeerLost,
    StaleCounter,
)
from tests.cuda import device_memory
from tests.cuda.bindings import context, good
from tests.engine.conftest import KEY, bytes_of, new_engine
from tests.engine.fabrics import engine_options
from tests.engine.gpu_peer import NBYTES as PEER_BYTES
from verify.polling import PATIENCE, eventually
from verify.processes.worker import WorkerProcess

NBYTES: Final = 1 << 20
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


def new_bytes(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def fill(memory: Memory, data: bytes) -> None:
    if memory.gpu is None:
        bytes_of(memory)[:] = np.frombuffer(data, np.uint8)
    else:
        device_memory.write(memory.region.address, data)


def contents(region: MemoryRegion) -> bytes:
    if region.gpu is None:
        return ctypes.string_at(region.address, region.nbytes)
    return device_memory.read(region.address, region.nbytes)


async def write_everything(
    sender: Engine, receiver: Engine, peer: Peer, source_gpu: int | None, target_gpu: int | None
) -> None:
    """Writes once at length, and 300 times with odd lengths to odd offsets. Every byte is there
    when the counter is complete, and no other byte has changed."""
    source = sender.alloc(NBYTES, gpu=source_gpu)
    target = receiver.alloc(NBYTES + 4096, gpu=target_gpu)
    data = new_bytes(NBYTES)
    fill(source, data)
    counter = receiver.counter()
    write = peer.write(
        source.region,
        target.region.descriptor,
        length=NBYTES,
        dst_offset=1001,
        imm=counter.imm,
    )
    await counter.wait(write.immediates, timeout=PATIENCE)
    assert contents(target.region) == bytes(1001) + data + bytes(3095)
    await write

    fill(target, bytes(target.nbytes))
    expected = bytearray(target.nbytes)
    rng = random.Random(1)
    offsets = [3001 * i + rng.randrange(500) for i in range(300)]
    lengths = [rng.randrange(1, 2500) for _ in offsets]
    origins = [rng.randrange(NBYTES - 2500) for _ in offsets]
    for offset, length, origin in zip(offsets, lengths, origins, strict=True):
        expected[offset : offset + length] = data[origin : origin + length]
    counter = receiver.counter()
    writes = peer.write_list(
        [source.region] * len(offsets),
        [target.region.descriptor] * len(offsets),
        src_offsets=origins,
        dst_offsets=offsets,
        lengths=lengths,
        imm=counter.imm,
    )
    await counter.wait(writes.immediates, timeout=PATIENCE)
    assert contents(target.region) == expected
    await writes
    source.close()
    target.close()


async def writes(fabric: str) -> None:
    """Writes between two engines of a process, from and to memory of a GPU and of the host."""
    before = device_memory.live()

    async def run() -> None:
        async with new_engine(fabric, "sender") as sender, new_engine(fabric, "target") as target:
            peer = await sender.connect(target.address, PATIENCE)
            assert peer.fabric == fabric
            for source_gpu, target_gpu in ((0, 0), (0, None), (None, 0)):
                await write_everything(sender, target, peer, source_gpu, target_gpu)

    await run()
    await all_is_freed(before)


async def all_is_freed(before: int | None) -> None:
    gc.collect()

    def freed() -> bool:
        _native.end_unused_gpus()
        return device_memory.live() == before

    await eventually(freed)


async def two_processes(fabric: str) -> None:
    """Writes each way between the GPU memory of two processes."""
    before = device_memory.live()

    async def run(other: WorkerProcess) -> None:
        async with new_engine(fabric, "here") as engine:
            theirs = await descriptor_of(other)
            memory = engine.alloc(PEER_BYTES, gpu=0)
            data = new_bytes(PEER_BYTES)
            fill(memory, data)
            peer = await engine.connect(other.address, PATIENCE)
            assert peer.fabric == fabric
            await peer.write(memory.region, theirs, length=PEER_BYTES)
            # A delivered write has been counted at the peer.
            assert bytes.fromhex((await ask(other, "read"))["data"]) == data

            counter = engine.counter()
            await ask(other, "fill", **{"with": 9})
            await ask(
                other,
                "write",
                address=engine.address,
                descriptor=memory.region.descriptor.hex(),
                imm=counter.imm,
                times=1,
            )
            await counter.wait_at_least(1, PATIENCE)
            assert contents(memory.region) == b"\t" * PEER_BYTES
            memory.close()

    with WorkerProcess("tests.engine.gpu_peer", "there", fabric) as other:
        await run(other)
    await all_is_freed(before)


async def other_gpus(fabric: str) -> None:
    """Writes from memory of one GPU to that of another GPU, of another process. That GPU reads the
    memory if it sees the first GPU and reads right bytes there; otherwise the bytes are staged in
    host memory, which is logged once."""
    if good(driver.cuDeviceGetCount()) < 2:
        return
    before = device_memory.live()
    notices = Notices()

    async def run(other: WorkerProcess, direct: bool, corrupt: bool) -> None:
        async with new_engine(fabric, "here") as engine:
            theirs = await descriptor_of(other)
            if corrupt:
                await ask(other, "corrupt")
            memory = engine.alloc(PEER_BYTES, gpu=0)
            peer = await engine.connect(other.address, PATIENCE)
            await write_rounds(engine, peer, memory.region, theirs, other, direct)
            memory.close()

    # GPU 0 of the other process is GPU 1 here.
    unseen, wrong = "cuMemImportFromShareableHandle failed", "reads wrong bytes there"
    for visible, why in (("1,0", ""), ("1", unseen), ("1,0", wrong)):
        if why == wrong and before is None:
            continue  # a real driver cannot corrupt its reads
        with WorkerProcess(
            "tests.engine.gpu_peer",
            "there",
            fabric,
            environment={"CUDA_VISIBLE_DEVICES": visible},
        ) as other:
            await run(other, fabric == "local" and not why, why == wrong)
        said = [each for each in notices.seen if why and why in each]
        assert len(said) == (fabric == "local" and why != ""), notices.seen
    await all_is_freed(before)


async def write_rounds(
    engine: Engine,
    peer: Peer,
    region: MemoryRegion,
    theirs: bytes,
    other: WorkerProcess,
    direct: bool,
) -> None:
    """Writes to all of the other process' memory, which it then reads. With `direct`, the rounds
    repeat until that process' GPU has opened the region and nothing is staged; before, and always
    without `direct`, all bytes are."""
    for round_ in range(100 if direct else 2):
        data = random.Random(round_).randbytes(PEER_BYTES)
        device_memory.write(region.address, data)
        before = engine.stats()["bytes_staged"]
        await peer.write(region, theirs, length=PEER_BYTES)
        assert bytes.fromhex((await ask(other, "read"))["data"]) == data
        staged = engine.stats()["bytes_staged"] - before
        if direct and not staged:
            return
        assert staged == PEER_BYTES
    assert not direct


async def created(fabric: str) -> None:
    """The other process maps memory of cuMemCreate that has files."""
    mapped = device_memory.create(PEER_BYTES)
    with WorkerProcess("tests.engine.gpu_peer", "there", fabric) as other:
        async with new_engine(fabric, "here") as engine:
            theirs = await descriptor_of(other)
            region = engine.register(mapped, PEER_BYTES)
            peer = await engine.connect(other.address, PATIENCE)
            await write_rounds(engine, peer, region, theirs, other, fabric == "local")
            region.close()


class Notices(logging.Handler):
    """The log messages of this process' engines from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        logging.getLogger("kvxfer").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


async def killed(fabric: str) -> None:
    await _ended_in_mid_transfer(fabric, freeze=False)


async def frozen(fabric: str) -> None:
    await _ended_in_mid_transfer(fabric, freeze=True)


async def _ended_in_mid_transfer(fabric: str, *, freeze: bool) -> None:
    """Kills or freezes a process while both write into each other's memory. This one's memory stays
    usable, nothing more lands there, and all of it is freed."""
    before = device_memory.live()
    seconds = 4.0 if freeze else PATIENCE  # the silence after which the frozen peer is lost

    def engine_here(name: str) -> Engine:
        return Engine(
            cluster_key=KEY, name=name, **{**engine_options(fabric), "peer_timeout": seconds}
        )

    async def run(other: WorkerProcess) -> None:
        async with engine_here("here") as engine, engine_here("third") as third:
            theirs = await descriptor_of(other)
            memory = engine.alloc(PEER_BYTES, gpu=0)
            peer = await engine.connect(other.address, PATIENCE)
            counter = engine.counter()
            other.tell(
                "write",
                address=engine.address,
                descriptor=memory.region.descriptor.hex(),
                imm=counter.imm,
                times=0,
            )
            source = engine.alloc(PEER_BYTES, gpu=0)
            written = 0

            async def write() -> None:
                nonlocal written
                while True:
                    await peer.write(source.region, theirs, length=PEER_BYTES)
                    written += 1

            writing = asyncio.create_task(write())
            await eventually(lambda: writing.done() or (written > 3 and counter.value > 3))
            assert not writing.done()
            if freeze:
                other.freeze()
            else:
                other.kill()
            with pytest.raises(PeerLost):
                await writing
            await eventually(lambda: not engine.peers)

            data = new_bytes(PEER_BYTES)
            fill(memory, data)
            if freeze:
                other.resume()
                await asyncio.wrap_future(other.event("lost"))
            target = third.alloc(PEER_BYTES, gpu=0)
            to_third = await engine.connect(third.address, PATIENCE)
            await to_third.write(memory.region, target.region.descriptor, length=PEER_BYTES)
            assert contents(target.region) == data
            assert contents(memory.region) == data
            for each in (memory, source, target):
                each.close()

    with WorkerProcess("tests.engine.gpu_peer", "there", fabric) as other:
        await run(other)
    await all_is_freed(before)


async def lost(fabric: str) -> None:
    """A GPU that fails ends every write from or to its memory, but none of host memory."""
    async with new_engine(fabric, "sender") as sender, new_engine(fabric, "target") as target:
        peer = await sender.connect(target.address, PATIENCE)
        here, there = sender.alloc(NBYTES, gpu=0), target.alloc(NBYTES, gpu=0)
        source, destination = sender.alloc(NBYTES), target.alloc(NBYTES)

        async def fails(src: MemoryRegion, dst: MemoryRegion) -> bool:
            try:
                await peer.write(src, dst.descriptor, length=NBYTES)
            except GpuLost:
                return True
            return False

        gone = device_memory.allocate(8 * NBYTES)
        region = sender.register(gone, 8 * NBYTES)
        device_memory.free(gone)
        await eventually(lambda: fails(region, destination.region))
        for src, dst in ((here, destination), (here, there), (source, there)) * 2:
            assert await fails(src.region, dst.region)
        data = new_bytes(NBYTES)
        fill(source, data)
        await peer.write(source.region, destination.region.descriptor, length=NBYTES)
        assert contents(destination.region) == data


class Stream:
    """A CUDA stream of GPU 0, as cuda.core and PyTorch show theirs."""

    def __init__(self) -> None:
        self.cuda_stream = int(good(driver.cuStreamCreate(_NON_BLOCKING)))

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def fill(self, region: MemoryRegion, value: int) -> None:
        good(driver.cuMemsetD8Async(region.address, value, region.nbytes, self.cuda_stream))

    def copy(self, target: MemoryRegion, source: MemoryRegion) -> None:
        good(
            driver.cuMemcpyDtoDAsync(
                target.address, source.address, target.nbytes, self.cuda_stream
            )
        )

    async def synchronize(self) -> None:
        def wait() -> None:
            context()
            good(driver.cuStreamSynchronize(self.cuda_stream))

        await asyncio.to_thread(wait)


async def streams(fabric: str) -> None:
    """One stream starts a write, another waits for it; each write moves what the stream made
    before."""
    async with new_engine(fabric, "sender") as sender, new_engine(fabric, "target") as target:
        peer = await sender.connect(target.address, PATIENCE)
        source, there = sender.alloc(NBYTES, gpu=0).region, target.alloc(NBYTES, gpu=0).region
        seen = target.alloc(NBYTES, gpu=0).region
        makes, uses = Stream(), Stream()
        watcher = sender.watcher(gpu=0)
        for round_ in range(1, 6):
            counter = target.counter()
            mirror = counter.mirror()
            write = peer.write(
                source,
                there.descriptor,
                length=NBYTES,
                imm=counter.imm,
                after=watcher.at(round_),
            )
            wait = counter.wait_on(uses, write.immediates, PATIENCE)
            uses.copy(seen, there)
            assert not wait.reached()
            makes.fill(source, round_)
            watcher.add_on((makes, makes.cuda_stream, SimpleNamespace(**vars(makes)))[round_ % 3])
            await uses.synchronize()
            assert wait.reached()
            assert ctypes.c_uint8.from_address(wait.address).value == 1
            await shows(mirror, write.immediates, ended=False)
            assert ctypes.c_uint64.from_address(mirror.address).value == mirror.value
            assert contents(seen) == bytes([round_]) * NBYTES
            await write
            counter.release()
            await shows(mirror, write.immediates, ended=True)

        never = target.counter()
        late, released = never.wait_on(uses, 1, 0.05), never.wait_on(uses, 1)
        await eventually(lambda: has_ended(late))
        never.release()
        await uses.synchronize()
        with pytest.raises(DeadlineExceeded, match="but it stands at 0 at the deadline"):
            late.reached()
        with pytest.raises(StaleCounter, match="to reach 1, but it was released"):
            released.reached()

        with pytest.raises(InvalidArgument, match=r"use add_on\(stream, 3\)"):
            watcher.add(3)
        with pytest.raises(InvalidArgument, match=r"engine\.watcher\(gpu=…\)"):
            sender.watcher().add_on(makes)
        with pytest.raises(InvalidArgument, match=r"stream is .*; pass a torch\.cuda\.Stream"):
            watcher.add_on("default")
        with pytest.raises(InvalidArgument, match="there is no GPU 77"):
            sender.watcher(gpu=77)


async def shows(mirror: CounterMirror, count: int, *, ended: bool) -> None:
    await eventually(lambda: (mirror.value >> 8, mirror.value & 0xFF != 0) == (count, ended))


def has_ended(wait: StreamWait) -> bool:
    try:
        return wait.reached()
    except DeadlineExceeded:
        return True


async def probed(fabric: str) -> None:
    """Runs on a GPU what `kvxfer doctor --probe` does."""
    before = device_memory.live()
    found = await asyncio.to_thread(loopback, fabric, None, 0)
    assert (found.verdict, found.error) == (Verdict.OK, None)
    ways = ["to the GPU", "on the GPU", "from the GPU"]
    assert [(each.nbytes, each.way) for each in found.sent] == [
        (nbytes, way) for nbytes in (16 << 10, 4 << 20) for way in ways
    ]
    missing = await asyncio.to_thread(loopback, fabric, None, 77)
    assert missing.verdict is Verdict.FAILED
    assert "there is no GPU 77" in str(missing.error)
    await all_is_freed(before)


async def descriptor_of(other: WorkerProcess) -> bytes:
    """Returns the descriptor of the other process' memory."""
    await other.started()
    return bytes.fromhex((await ask(other, "describe"))["descriptor"])


async def ask(other: WorkerProcess, do: str, **arguments: Any) -> dict[str, Any]:
    return await asyncio.wrap_future(other.begin(do, **arguments))


CASES: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    case.__name__: case
    for case in (writes, two_processes, other_gpus, created, lost, streams, probed, killed, frozen)
}

if __name__ == "__main__":
    name, fabric = sys.argv[1:]
    context()
    asyncio.run(CASES[name](fabric))
