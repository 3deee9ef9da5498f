"""Triton's kernels on a stream of the double: interpreted, in the stream's order, with pauses.

It is for processes that run_on_driver() has started, with TRITON_INTERPRET=1. The processor cannot
access the address of device memory that a kernel gets; the double gives the place of the bytes, but
only while the stream runs the kernel.

    stream = int(good(driver.cuStreamCreate(1)))
    plane = device_tensor(address, (blocks, 16, 2, 64), torch.float32)
    with kernels_on(stream):
        store_tokens(plane, …)  # queued; returns at once
    synchronize(stream)
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from cuda.bindings import driver
from triton.runtime.interpreter import GridExecutor

from tests.cuda import device_memory
from tests.cuda.bindings import good

_KERNEL: Final = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)

_run_now: Final = GridExecutor.__call__
# Triton's interpreter has one state for all threads.
_interpreter: Final = threading.Lock()
_stream_of_thread: Final = threading.local()
_numbers: Final = itertools.count(1)
_queued: Final[dict[int, Callable[[], None]]] = {}
_errors: Final[list[BaseException]] = []


def device_tensor(address: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns device memory as a tensor for kernels and views alone: reading its items faults."""
    memory = (ctypes.c_int8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape))


@contextlib.contextmanager
def kernels_on(stream: int) -> Iterator[None]:
    """Queues the kernels that this thread launches in the block on the stream. The caller must not
    change host tensors that a kernel was given before it has run."""
    before = getattr(_stream_of_thread, "stream", None)
    _stream_of_thread.stream = stream
    try:
        yield
    finally:
        _stream_of_thread.stream = before


def synchronize(stream: int) -> None:
    """Waits for the stream; raises the first error of a kernel, or the driver's error."""
    (error,) = driver.cuStreamSynchronize(stream)
    if _errors:
        raise _errors[0]
    assert error == driver.CUresult.CUDA_SUCCESS, driver.cuGetErrorName(error)


def _launch(self: GridExecutor, *arguments: Any, **keywords: Any) -> None:
    stream = getattr(_stream_of_thread, "stream", None)
    assert stream is not None, "a kernel was launched outside of kernels_on()"
    on_device = {
        tensor.data_ptr()
        for tensor in (*arguments, *keywords.values())
        if isinstance(tensor, torch.Tensor)
        and tensor.numel()
        and device_memory.is_known(tensor.data_ptr())
    }

    def found(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.data_ptr() in on_device:
            return _alias(argument)
        return argument

    def run() -> None:
        with _interpreter:
            there = {name: found(argument) for name, argument in keywords.items()}
            _run_now(self, *map(found, arguments), **there)

    number = next(_numbers)
    _queued[number] = run
    good((driver.CUresult(_double.cuda_double_launch(stream, _run_queued, number)), None))


@_KERNEL
def _run_queued(number: int) -> bool:
    """Runs a kernel on the stream's thread. False is an illegal address: it poisons the context."""
    try:
        _queued.pop(number)()
    except BaseException as error:
        _errors.append(error)
        return False
    return True


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same items at an address that the running stream can access."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    items = 1 + sum((size - 1) * stride for size, stride in sizes)
    nbytes = items * tensor.dtype.itemsize
    address = _double.cuda_double_alias(tensor.data_ptr(), nbytes)
    if not address:
        raise MemoryError(f"an illegal address: {nbytes} bytes at {tensor.data_ptr():#x}")
    memory = (ctypes.c_int8 * nbytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


_double: Final[Any] = ctypes.CDLL("libcuda.so.1")
_double.cuda_double_launch.argtypes = [ctypes.c_void_p, _KERNEL, ctypes.c_void_p]
_double.cuda_double_alias.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
_double.cuda_double_alias.restype = ctypes.c_void_p
GridExecutor.__call__ = _launch
