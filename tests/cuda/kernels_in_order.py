"""Kernels of Triton on streams of the double: `python -m tests.cuda.kernels_in_order CASE`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

import torch
from cuda.bindings import driver

from kvxfer.kernels import paged_attention, store_tokens
from tests.cuda import device_memory
from tests.cuda.bindings import context, good
from tests.cuda.kernel_streams import device_tensor, kernels_on, synchronize
from tests.kernels.paged_planes import attention

SHAPE: Final = (6, 4, 2, 16)  # blocks, tokens, heads, head_size
TOKENS: Final = 24
NBYTES: Final = TOKENS * 2 * 16 * 4
GRANULE: Final = 2 << 20  # the granularity of cuMemCreate


def planes() -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (
        device_tensor(device_memory.allocate(NBYTES), SHAPE, torch.float32) for _ in range(2)
    )
    return keys, values


def new_tokens(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, TOKENS, 2, 16, generator=generator)
    return keys, values


def order() -> None:
    """Checks that a kernel reads what earlier kernels on the stream wrote, and that none runs
    before its turn."""
    keys, values = planes()
    slots, blocks = torch.arange(TOKENS), torch.arange(6)
    queries = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    host = int(good(driver.cuMemHostAlloc(8, 0)))
    stream = int(good(driver.cuStreamCreate(1)))
    good(driver.cuStreamWaitValue64(stream, host, 1, 0))
    found = []
    for seed in range(20):
        with kernels_on(stream):
            store_tokens(keys, values, slots, *new_tokens(seed))
            found.append(paged_attention(queries, keys, values, blocks, TOKENS))
    assert device_memory.read(keys.data_ptr(), NBYTES) == bytes(NBYTES)
    good(driver.cuStreamWriteValue64(good(driver.cuStreamCreate(1)), host, 1, 0))
    synchronize(stream)
    for seed, each in enumerate(found):
        torch.testing.assert_close(each, attention(queries, *new_tokens(seed)))
    last = b"".join(device_memory.read(plane.data_ptr(), NBYTES) for plane in (keys, values))
    assert last == b"".join(new.numpy().tobytes() for new in new_tokens(19))


def unmapped() -> None:
    """Checks that a kernel on unmapped memory poisons the context."""
    address = device_memory.create(GRANULE)
    keys, values = (device_tensor(address + at, SHAPE, torch.float32) for at in (0, NBYTES))
    stream = int(good(driver.cuStreamCreate(1)))
    host = int(good(driver.cuMemHostAlloc(8, 0)))
    good(driver.cuStreamWaitValue64(stream, host, 1, 0))
    with kernels_on(stream):
        store_tokens(keys, values, torch.arange(TOKENS), *new_tokens(0))
    device_memory.take_away(address, GRANULE)
    good(driver.cuStreamWriteValue64(good(driver.cuStreamCreate(1)), host, 1, 0))
    try:
        synchronize(stream)
    except MemoryError as error:
        assert "an illegal address" in str(error)
    else:
        raise AssertionError("it ran")
    (state,) = driver.cuCtxSynchronize()
    assert state == driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS


CASES: Final[dict[str, Callable[[], None]]] = {case.__name__: case for case in (order, unmapped)}

if __name__ == "__main__":
    context()
    CASES[sys.argv[1]]()
