"""Memory of a GPU as Python programs move it: `python -m tests.engine.gpu_memory CASE [FABRIC]`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from cuda.bindings import driver

from kvxfer import Engine, Memory, MemoryRegion, Peer, StreamWait
from kvxfer.doctor.loopback import Verdict, loopback
from kvxfer.errors import (
    DeadlineExceeded,
    FabricUnavailable,
    GpuLost,
    InvalidArgument,
    OutOfBounds,
    OutOfMemory,
    PeerLost,
    StaleCounter,
)
from tests.cuda import device_memory
from tests.cuda.bindings import context, good
from tests.engine.conftest import KEY, bytes_of, new_engine
from tests.engine.fabrics import chosen, engine_options
from tests.engine.gpu_peer import NBYTES as PEER_BYTES
from verify.polling import PATIENCE, eventually
from verify.processes.worker import WorkerProcess

NBYTES: Final = 1 << 20
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING


class CudaArray:
    """An array as Numba and CuPy show theirs."""

    def __init__(self, address: int, shape: tuple[int, ...] = (NBYTES,), **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            **changes,
        }


class DlpackArray:
    """Shows nothing but DLPack, as version 0 of it."""

    def __init__(self, memory: Memory, device: tuple[int, int] = (2, 0)) -> None:
        self._memory = memory
        self._device = device

    def __dlpack__(self, stream: int | None = None) -> object:
        assert stream == -1
        return self._memory.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class _VersionedTensor(ctypes.Structure):
    """DLManagedTensorVersioned of dlpack.h, of float16."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))


class Tensor:
    """Shows DLPack of version 1: a tensor of float16 that begins 64 bytes behind an address."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], flags: int = 0
    ) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(strides))(*strides)
        self._tensor = _VersionedTensor(
            version=(1, 0),
            flags=flags,
            data=address,
            device=(2, 0),
            ndim=len(shape),
            code=2,
            bits=16,
            lanes=1,
            shape=self._shape,
            strides=self._strides,
            offset=64,
        )

    def __dlpack__(self, *, stream: int | None, max_version: tuple[int, int]) -> object:
        assert (stream, max_version) == (-1, (1, 0))
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor_versioned", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def torch_tensor(address: int, gpu: int = 0, device: str = "cuda", **changes: Any) -> Any:
    """What is asked of a torch tensor."""
    fields = {
        "data_ptr": lambda: address,
        "device": SimpleNamespace(type=device, index=gpu),
        "is_contiguous": lambda: True,
        "nbytes": NBYTES,
    }
    return SimpleNamespace(**(fields | changes))


def new_bytes(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


# --- memory ----------------------------------------------------------------------------------


async def allocated() -> None:
    """Memory of a GPU is zeroed, says where it is, and is none of the processor's."""
    async with new_engine("tcp", "engine") as engine:
        memory = engine.alloc(NBYTES, gpu=0)
        region = memory.region
        assert (region.gpu, region.nbytes, memory.gpu) == (0, NBYTES, 0)
        assert repr(region) == f"MemoryRegion(address={region.address:#x}, nbytes=1048576, gpu=0)"
        assert not any(device_memory.read(region.address, NBYTES))
        assert memory.__cuda_array_interface__ == {
            "shape": (NBYTES,),
            "typestr": "|u1",
            "data": (region.address, False),
            "strides": None,
            "version": 3,
        }
        assert memory.__dlpack_device__() == (2, 0)
        with pytest.raises(InvalidArgument, match="memory of GPU 0"):
            region.checksum(np.array([0]), np.array([0]), 16)
        with pytest.raises(BufferError) as unread:
            memoryview(memory)
        assert "memory of GPU 0" in str(unread.value.__cause__)

        host = engine.alloc(NBYTES)
        assert host.region.gpu is None
        assert not hasattr(host, "__cuda_array_interface__")
        assert host.__dlpack_device__() == (1, 0)


async def freed() -> None:
    """What is allocated goes back when the last that holds it is gone."""
    async with new_engine("tcp", "engine") as engine:
        memory = engine.alloc(NBYTES, gpu=0)
        memory.region.write(b"abc", NBYTES - 3)
        seen = bytearray(4)
        memory.region.read(seen, NBYTES - 4)
        assert seen == b"\0abc"
        address, capsule = memory.region.address, memory.__dlpack__()
        region = engine.register(DlpackArray(memory))
        memory.close()
        del memory
        assert device_memory.is_known(address)
        del capsule
        gc.collect()
        assert device_memory.is_known(address)  # it is registered
        region.close()
        await eventually(lambda: not device_memory.is_known(address))


async def not_on_nics() -> None:
    """A NIC that cannot reach it is named, and a fall to tcp can be forbidden."""
    if "ofi" not in chosen():
        return
    options = {**engine_options("ofi"), "fabrics": ["ofi", "tcp"]}
    async with Engine(cluster_key=KEY, name="engine", **options) as engine:
        assert engine.alloc(NBYTES, gpu=0).region.nics == (None,) * len(engine.nics)
        with pytest.raises(FabricUnavailable, match="of fabric ofi does not reach memory of GPU 0"):
            engine.alloc(NBYTES, gpu=0, require_nics=True)
        assert engine.alloc(NBYTES, require_nics=True).region.nics == ("host",) * len(engine.nics)


async def registered() -> None:
    """Arrays, tensors and addresses are what CUDA says that they are."""
    async with new_engine("tcp", "engine") as engine:
        memory = engine.alloc(NBYTES, gpu=0)
        address = memory.region.address

        def registers(target: Any, nbytes: int | None = None) -> tuple[int, int, int | None]:
            region = engine.register(target, nbytes)
            found = (region.address, region.nbytes, region.gpu)
            region.close()
            return found

        whole = (address, NBYTES, 0)
        assert registers(address, NBYTES) == whole
        assert registers(memory) == whole
        assert registers(DlpackArray(memory)) == whole
        assert registers(torch_tensor(address)) == whole
        assert registers(CudaArray(address)) == whole
        assert registers(CudaArray(address), 100) == (address, 100, 0)
        array = CudaArray(address, (4, 1, 8), typestr="<f4", strides=(32, 7, 4))
        assert registers(array) == (address, 128, 0)
        tensor = Tensor(address, (3, 1, 5), (5, 99, 1))
        assert registers(tensor) == (address + 64, 30, 0)
        host = np.zeros(NBYTES, np.uint8)
        assert registers(host) == (host.ctypes.data, NBYTES, None)


async def refused() -> None:
    """What cannot be registered is named, and stays unregistered."""
    async with new_engine("tcp", "engine") as engine:
        memory = engine.alloc(NBYTES, gpu=0)
        address = device_memory.allocate(NBYTES)
        gone = device_memory.allocate(NBYTES)
        device_memory.free(gone)
        unknown = "CUDA does not know the {} at address {:#x} as memory of a GPU: it was freed"
        elsewhere = "{} at address {:#x} says that it is on GPU 5, and CUDA says GPU 0"
        host = np.zeros(NBYTES, np.uint8)
        on_host = host.ctypes.data
        cases: list[tuple[Any, str]] = [
            (CudaArray(address, data=(address, True)), "the CudaArray is read-only"),
            (
                CudaArray(address, (4, 4), strides=(8, 1)),
                r"the CudaArray is not contiguous \(shape \(4, 4\), strides \(8, 1\)\); register a",
            ),
            (CudaArray(address, (0, 4)), r"the CudaArray is empty \(shape \(0, 4\)\)"),
            (CudaArray(gone), unknown.format("CudaArray", gone)),
            (CudaArray(on_host), unknown.format("CudaArray", on_host)),
            (Tensor(address, (4, 4), (1, 4)), "the Tensor is not contiguous"),
            (Tensor(address, (4, 4), (4, 1), flags=1), "the Tensor is read-only"),
            (Tensor(gone, (4, 4), (4, 1)), unknown.format("Tensor", gone + 64)),
            (
                DlpackArray(memory, (2, 5)),
                elsewhere.format("DlpackArray", memory.region.address),
            ),
            (DlpackArray(memory, (10, 0)), "cannot register a DlpackArray; pass"),
            (torch_tensor(gone), unknown.format("tensor", gone)),
            (torch_tensor(address, gpu=5), elsewhere.format("tensor", address)),
            (torch_tensor(address, is_contiguous=lambda: False), "the tensor is not contiguous"),
            (
                torch_tensor(address, device=SimpleNamespace(type="xpu")),
                "type='xpu'.* cannot be registered; copy it to the CPU or a CUDA GPU",
            ),
        ]
        for target, text in cases:
            with pytest.raises(InvalidArgument, match=text):
                engine.register(target)
        assert not engine._regions
        with pytest.raises(OutOfBounds, match="leave the memory of GPU 0"):
            engine.register(address, 1 << 40)
        with pytest.raises(InvalidArgument, match="there is no GPU 77"):
            engine.alloc(NBYTES, gpu=77)
        with pytest.raises(InvalidArgument, match="there is no GPU -1"):
            engine.alloc(NBYTES, gpu=-1)
        with pytest.raises(OutOfMemory, match="of GPU 0"):
            engine.alloc(1 << 50, gpu=0)
        device_memory.free(address)


async def without_driver() -> None:
    """Without a CUDA driver there is host memory only."""
    async with new_engine("tcp", "engine") as engine:
        with pytest.raises(FabricUnavailable, match=r"libcuda\.so\.1 cannot be loaded; install"):
            engine.alloc(NBYTES, gpu=0)
        assert engine.alloc(NBYTES).region.gpu is None
        with pytest.raises(InvalidArgument, match="CUDA does not know the CudaArray"):
            engine.register(CudaArray(np.zeros(NBYTES, np.uint8).ctypes.data))


# --- writes ----------------------------------------------------------------------------------


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
    """One long write, and 300 of odd lengths to odd offsets: every byte is there when the counter
    is, and no other is touched."""
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
    """Between two engines of a process, from and to memory of a GPU and of the host."""
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
    await eventually(lambda: device_memory.live() == before)


async def two_processes(fabric: str) -> None:
    """Writes each way between memory of a GPU that two processes have."""
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
            # Delivered is what the peer has counted.
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


async def killed(fabric: str) -> None:
    """A process is killed while both write into each other's memory: what is of this one is usable,
    and all of it goes back."""
    before = device_memory.live()

    async def run(other: WorkerProcess) -> None:
        async with new_engine(fabric, "here") as engine, new_engine(fabric, "third") as third:
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
            other.kill()
            with pytest.raises(PeerLost):
                await writing
            await eventually(lambda: not engine.peers)

            data = new_bytes(PEER_BYTES)
            fill(memory, data)
            target = third.alloc(PEER_BYTES, gpu=0)
            to_third = await engine.connect(third.address, PATIENCE)
            await to_third.write(memory.region, target.region.descriptor, length=PEER_BYTES)
            assert contents(target.region) == data
            assert contents(memory.region) == data  # nothing of the dead peer lands any more
            for each in (memory, source, target):
                each.close()

    with WorkerProcess("tests.engine.gpu_peer", "there", fabric) as other:
        await run(other)
    await all_is_freed(before)


async def lost(fabric: str) -> None:
    """A GPU that fails ends writes from and to its memory, each time, and none of host memory."""
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
    """A stream starts a write, another waits for it: each moves what the one before had made."""
    async with new_engine(fabric, "sender") as sender, new_engine(fabric, "target") as target:
        peer = await sender.connect(target.address, PATIENCE)
        source, there = sender.alloc(NBYTES, gpu=0).region, target.alloc(NBYTES, gpu=0).region
        seen = target.alloc(NBYTES, gpu=0).region
        makes, uses = Stream(), Stream()
        watcher = sender.watcher(gpu=0)
        for round_ in range(1, 6):
            counter = target.counter()
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
            assert contents(seen) == bytes([round_]) * NBYTES
            await write
            counter.release()

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
        with pytest.raises(InvalidArgument, match="a str is no CUDA stream"):
            watcher.add_on("default")
        with pytest.raises(InvalidArgument, match="there is no GPU 77"):
            sender.watcher(gpu=77)


def has_ended(wait: StreamWait) -> bool:
    try:
        return wait.reached()
    except DeadlineExceeded:
        return True


async def probed(fabric: str) -> None:
    """What `kvxfer doctor --probe` does with a GPU."""
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
    """That of the memory that it has."""
    await other.started()
    return bytes.fromhex((await ask(other, "describe"))["descriptor"])


async def ask(other: WorkerProcess, do: str, **arguments: Any) -> dict[str, Any]:
    return await asyncio.wrap_future(other.begin(do, **arguments))


MEMORY: Final[dict[str, Callable[[], Awaitable[None]]]] = {
    case.__name__: case for case in (allocated, freed, registered, refused, not_on_nics)
}
BETWEEN: Final[dict[str, Callable[[str], Awaitable[None]]]] = {
    case.__name__: case for case in (writes, two_processes, lost, streams, probed)
}

if __name__ == "__main__":
    name, *fabrics = sys.argv[1:]
    if name != without_driver.__name__:
        context()
    every: dict[str, Callable[..., Any]] = {
        **MEMORY,
        **BETWEEN,
        killed.__name__: killed,
        without_driver.__name__: without_driver,
    }
    asyncio.run(every[name](*fabrics))
