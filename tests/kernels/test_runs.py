"""Runs copied by kernels, compared with the same plan in numpy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.kernels import copy_runs
from kvxfer.kv.plan import plan_transfer
from kvxfer.kv.plane_writes import Runs
from kvxfer.layout import HeadOrder, KvArrangement, KvLayout
from tests.kernels.tensors import of, random_bytes

BLOCKS = 24
LAYOUT = KvLayout(num_layers=1, num_kv_heads=4, head_size=16, dtype="bfloat16", block_size=8)


def check(
    runs: Runs,
    source_ids: list[int],
    target_ids: list[int],
    *,
    source_begin: int = 0,
    target_begin: int = 0,
    first_block: int = 0,
) -> None:
    """Checks that the kernel copies exactly what the plan says, and changes nothing else."""
    source = random_bytes(source_begin + BLOCKS * runs.src_stride, 1)
    target = random_bytes(target_begin + BLOCKS * runs.dst_stride, 2)
    tables = (np.array(source_ids, dtype=np.int32), np.array(target_ids, dtype=np.int32))
    on_device = of(target)
    copy_runs(
        runs,
        of(source),
        of(tables[0]),
        on_device,
        of(tables[1]),
        source_begin=source_begin,
        target_begin=target_begin,
        first_block=first_block,
    )
    for src, dst, _ in zip(*runs.offsets(*tables, first_block), strict=True):
        begin, end = target_begin + dst, target_begin + dst + runs.length
        target[begin:end] = source[source_begin + src : source_begin + src + runs.length]
    assert np.array_equal(on_device.cpu().numpy(), target)


def runs_between(prefill: KvLayout, decode: KvLayout, gap: int = 0) -> list[Runs]:
    """Returns the runs of one layer between pools whose blocks lie `gap` bytes apart."""
    plan = plan_transfer(prefill, decode, decode_permutes=False)
    cycle = [plan.cycle_tokens // side.block_size for side in (prefill, decode)]
    found = []
    for copy in plan.layers[0].copies:
        run = np.arange(copy.count, dtype=np.int64)
        rows = np.zeros((copy.count, 4), dtype=np.int64)
        rows[:, 0], rows[:, 1] = copy.src_block, copy.src_offset + run * copy.src_stride
        rows[:, 2], rows[:, 3] = copy.dst_block, copy.dst_offset + run * copy.dst_stride
        strides = (prefill.part_bytes + gap, decode.part_bytes + gap)
        found.append(Runs(copy.length, *cycle, *strides, rows))
    return found


@pytest.mark.parametrize("kv", ["separate", "interleaved"])
@pytest.mark.parametrize("order", list(itertools.product(("NHD", "HND"), repeat=2)), ids="-".join)
@pytest.mark.parametrize("block_sizes", [(8, 8), (16, 4), (4, 16)], ids=str)
@pytest.mark.parametrize("tp", [1, 2])
def test_layouts_are_bridged(
    kv: KvArrangement, order: tuple[HeadOrder, HeadOrder], block_sizes: tuple[int, int], tp: int
) -> None:
    prefill = replace(LAYOUT, kv=kv, order=order[0], block_size=block_sizes[0])
    decode = replace(LAYOUT, kv=kv, order=order[1], block_size=block_sizes[1], tp_size=tp)
    tokens = 4 * 16
    source_ids = list(range(20, 20 - tokens // block_sizes[0], -1))
    target_ids = list(range(3, 3 + tokens // block_sizes[1]))
    for runs in runs_between(prefill, decode, gap=48):
        check(runs, source_ids, target_ids, source_begin=16, target_begin=32)


def test_blocks_that_are_absent_or_beyond_a_table_are_left_out() -> None:
    (runs,) = runs_between(LAYOUT, replace(LAYOUT, block_size=32))[:1]
    check(runs, [3, 5, 7, 9, 11, 13], [2, 4])  # a part of the last cycle
    check(runs, [3, 5, 7, 9, 11, 13, 15, 17], [-1, 4])
    check(runs, [3, 5, 7, 9, 11, 13, 15, 17], [4], first_block=1)
    check(runs, [], [])


@pytest.mark.parametrize("length", [1, 3, 8, 24, 100, 4096, 40_000])
def test_runs_of_any_length_and_alignment(length: int) -> None:
    rows = np.array([[0, 1, 0, 2]], dtype=np.int64)
    runs = Runs(length, 1, 1, length + 5, length + 6, rows)
    check(runs, [4, 0, 2], [1, 7, 3], source_begin=3, target_begin=1)


def test_invalid_block_tables_and_pools_are_refused() -> None:
    runs = Runs(8, 1, 1, 8, 8, np.zeros((1, 4), dtype=np.int64))
    pool, ids = of(random_bytes(64)), of(np.zeros(2, dtype=np.int32))
    with pytest.raises(InvalidArgument, match=r"source_ids is \[2\] of torch.int64"):
        copy_runs(runs, pool, ids.long(), pool, ids)
    with pytest.raises(InvalidArgument, match=r"target is a tensor of torch.int16"):
        copy_runs(runs, pool, ids, pool.view(torch.int16), ids)
