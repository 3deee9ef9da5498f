"""NVIDIA's own Python bindings as a client of the driver: `python -m tests.cuda.bindings CASE`.

The driver is the libcuda.so.1 that the loader finds.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from cuda.bindings import driver

BYTES: Final = 4096
_HANDLE_BYTES: Final = 64


def good(answer: tuple[Any, ...]) -> Any:
    """Returns the values of a call that returned CUDA_SUCCESS."""
    error, *values = answer
    assert error == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorName(error)
    return values[0] if len(values) == 1 else values


def context() -> None:
    good(driver.cuInit(0))
    good(driver.cuCtxSetCurrent(good(driver.cuDevicePrimaryCtxRetain(0))))


def fill(address: Any, value: int) -> None:
    good(driver.cuMemcpyHtoD(address, bytes([value]) * BYTES, BYTES))


def first_byte(address: Any) -> int:
    byte = bytearray(1)
    good(driver.cuMemcpyDtoH(byte, address, 1))
    return byte[0]


def memory() -> None:
    """Copies bytes to the device, within it and back; an address says what memory it is."""
    first, second = (good(driver.cuMemAlloc(BYTES)) for _ in range(2))
    fill(first, 7)
    good(driver.cuMemcpyDtoD(second, first, BYTES))
    assert first_byte(second) == 7
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    device = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert good(driver.cuPointerGetAttribute(kind, second)) == device
    good(driver.cuMemFree(first))
    good(driver.cuMemFree(second))
    (error,) = driver.cuMemFree(second)
    assert error == driver.CUresult.CUDA_ERROR_INVALID_VALUE


def order() -> None:
    """Makes a stream wait for a word, and another one for its event."""
    first, second = (good(driver.cuStreamCreate(1)) for _ in range(2))
    event = good(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    host = good(driver.cuMemHostAlloc(16, 0))
    words = (ctypes.c_uint64 * 2).from_address(int(host))
    words[0] = words[1] = 0
    good(driver.cuStreamWaitValue64(first, int(host), 1, 0))
    good(driver.cuEventRecord(event, first))
    good(driver.cuStreamWaitEvent(second, event, 0))
    good(driver.cuStreamWriteValue64(second, int(host) + 8, 5, 0))
    (state,) = driver.cuStreamQuery(second)
    assert state == driver.CUresult.CUDA_ERROR_NOT_READY
    assert words[1] == 0
    words[0] = 1
    good(driver.cuStreamSynchronize(second))
    assert words[1] == 5
    good(driver.cuMemFreeHost(host))


def graph() -> None:
    """Checks that captured work runs only when it is launched."""
    stream = good(driver.cuStreamCreate(1))
    address = good(driver.cuMemAlloc(BYTES))
    fill(address, 1)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    good(driver.cuStreamBeginCapture(stream, mode))
    good(driver.cuMemsetD8Async(address, 9, BYTES, stream))
    captured = good(driver.cuStreamEndCapture(stream))
    assert first_byte(address) == 1
    ready = good(driver.cuGraphInstantiate(captured, 0))
    good(driver.cuGraphLaunch(ready, stream))
    good(driver.cuStreamSynchronize(stream))
    assert first_byte(address) == 9
    good(driver.cuMemFree(address))


def share() -> None:
    """Lets another process open a handle of the memory and write into it."""
    address = good(driver.cuMemAlloc(BYTES))
    fill(address, 3)
    handle = ctypes.string_at(good(driver.cuIpcGetMemHandle(address)).getPtr(), _HANDLE_BYTES)
    command = [sys.executable, "-m", __spec__.name, "importer"]
    subprocess.run(command, input=handle, check=True)
    assert first_byte(address) == 4
    good(driver.cuMemFree(address))


def importer() -> None:
    """Runs as the other process of `share`."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), sys.stdin.buffer.read(), _HANDLE_BYTES)
    lazy = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    address = good(driver.cuIpcOpenMemHandle(handle, lazy.value))
    assert first_byte(address) == 3
    fill(address, 4)
    good(driver.cuIpcCloseMemHandle(address))


CASES: Final[dict[str, Callable[[], None]]] = {
    case.__name__: case for case in (memory, order, graph, share)
}

if __name__ == "__main__":
    context()
    {**CASES, "importer": importer}[sys.argv[1]]()
