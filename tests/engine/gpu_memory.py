"""GPU memory as Python programs register it: `python -m tests.engine.gpu_memory CASE`."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from kvxfer import Engine, Memory
from kvxfer.errors import (
    FabricUnavailable,
    InvalidArgument,
    OutOfBounds,
    OutOfMemory,
)
from tests.cuda import device_memory
from tests.cuda.bindings import context
from tests.engine.conftest import KEY, new_engine
from tests.engine.fabrics import chosen, engine_options
from verify.polling import eventually

NBYTES: Final = 1 << 20


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
    """An array that shows DLPack version 0 only."""

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
    """A float16 tensor that begins 64 bytes behind an address, and shows DLPack version 1."""

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
    """A stand-in for a torch tensor, with the members that the engine uses."""
    fields = {
        "data_ptr": lambda: address,
        "device": SimpleNamespace(type=device, index=gpu),
        "is_contiguous": lambda: True,
        "nbytes": NBYTES,
    }
    return SimpleNamespace(**(fields | changes))


# --- memory ----------------------------------------------------------------------------------


async def allocated() -> None:
    """GPU memory is zeroed, reports its GPU, and has no buffer for the processor."""
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
    """Memory is freed once its last holder is closed or collected."""
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
        assert device_memory.is_known(address)  # it is still registered
        region.close()
        await eventually(lambda: not device_memory.is_known(address))


async def not_on_nics() -> None:
    """The error names a NIC that cannot reach GPU memory, and a fallback to tcp can be
    forbidden."""
    if "ofi" not in chosen():
        return
    options = {**engine_options("ofi"), "fabrics": ["ofi", "tcp"]}
    async with Engine(cluster_key=KEY, name="engine", **options) as engine:
        assert engine.alloc(NBYTES, gpu=0).region.nics == (None,) * len(engine.nics)
        with pytest.raises(FabricUnavailable, match=r"does not reach memory of GPU 0.*FI_HMEM"):
            engine.alloc(NBYTES, gpu=0, require_nics=True)
        assert engine.alloc(NBYTES, require_nics=True).region.nics == ("host",) * len(engine.nics)


async def registered() -> None:
    """Arrays, tensors and addresses are registered as CUDA describes them."""
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
    """The error names what cannot be registered, and nothing is registered."""
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
        with pytest.raises(InvalidArgument, match="gpu is -1; pass an int"):
            engine.alloc(NBYTES, gpu=-1)
        with pytest.raises(OutOfMemory, match="of GPU 0"):
            engine.alloc(1 << 50, gpu=0)
        device_memory.free(address)


async def without_driver() -> None:
    """Only host memory works without a CUDA driver."""
    async with new_engine("tcp", "engine") as engine:
        with pytest.raises(FabricUnavailable, match=r"libcuda\.so\.1 cannot be loaded; install"):
            engine.alloc(NBYTES, gpu=0)
        assert engine.alloc(NBYTES).region.gpu is None
        with pytest.raises(InvalidArgument, match="CUDA does not know the CudaArray"):
            engine.register(CudaArray(np.zeros(NBYTES, np.uint8).ctypes.data))


# --- writes ----------------------------------------------------------------------------------


CASES: Final[dict[str, Callable[[], Awaitable[None]]]] = {
    case.__name__: case for case in (allocated, freed, registered, refused, not_on_nics)
}

if __name__ == "__main__":
    (name,) = sys.argv[1:]
    if name == without_driver.__name__:
        asyncio.run(without_driver())
    else:
        context()
        asyncio.run(CASES[name]())
