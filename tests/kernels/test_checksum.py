"""Runs hashed by a kernel, compared with the engine's checksum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvxfer import Engine
from kvxfer.errors import InvalidArgument
from kvxfer.kernels import checksum_runs
from tests.kernels.tensors import of, random_bytes

NUMBERS = (0, 1, 1 << 40, (1 << 48) + 3, (1 << 63) - 1)


@pytest.mark.native
@pytest.mark.parametrize("length", [248, 256, 1016, 1024, 1032, 2048, 4096, 5000])
async def test_the_kernel_and_the_host_give_the_same_checksum(length: int) -> None:
    async with Engine(cluster_key=b"k" * 32, fabrics=("tcp",)) as engine:
        memory = engine.alloc(64 * 1024 + 3)
        bytes_ = random_bytes(memory.nbytes)
        memoryview(memory)[:] = bytes_.tobytes()
        count = 37  # more than one program hashes
        offsets = np.arange(count, dtype=np.int64) * 8 * 61
        numbers = np.resize(np.array(NUMBERS, dtype=np.int64), count)
        there = memory.region.checksum(offsets, numbers, length)
        here = checksum_runs(of(bytes_), of(offsets), of(numbers), length)
        assert int(here) % (1 << 64) == there


def test_a_changed_byte_or_place_changes_the_checksum() -> None:
    bytes_, numbers = random_bytes(4096), np.array([1, 2], dtype=np.int64)

    def of_runs(*offsets: int) -> int:
        return int(checksum_runs(of(bytes_), of(np.array(offsets)), of(numbers), 1024))

    before = of_runs(0, 1024)
    assert of_runs(1024, 0) != before
    bytes_[1700] ^= 1
    assert of_runs(0, 1024) != before


def test_no_runs_are_zero() -> None:
    none = of(np.zeros(0, dtype=np.int64))
    assert int(checksum_runs(of(random_bytes(256)), none, none, 256)) == 0


def test_other_types_are_refused() -> None:
    memory, one = of(random_bytes(512)), of(np.zeros(1, dtype=np.int64))
    with pytest.raises(InvalidArgument, match=r"memory is a tensor of torch.int64"):
        checksum_runs(memory.view(torch.int64), one, one, 256)
    with pytest.raises(InvalidArgument, match=r"offsets of torch.int32"):
        checksum_runs(memory, one.int(), one, 256)
    with pytest.raises(InvalidArgument, match=r"\[1\] runs with \[0\] numbers"):
        checksum_runs(memory, one, one[:0], 256)


@pytest.mark.parametrize("length", [8, 240, 252])
def test_lengths_that_only_the_host_hashes_are_refused(length: int) -> None:
    one = of(np.zeros(1, dtype=np.int64))
    with pytest.raises(InvalidArgument, match=rf"runs of {length} bytes"):
        checksum_runs(of(random_bytes(512)), one, one, length)
