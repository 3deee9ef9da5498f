"""Heads of blocks swapped in place by kernels, compared with torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.kernels import permute_heads
from kvxfer.layout import HeadOrder, KvArrangement, KvLayout
from tests.kernels.tensors import of, random_bytes

BLOCKS = 10
LAYOUT = KvLayout(num_layers=1, num_kv_heads=4, head_size=16, dtype="bfloat16", block_size=8)


@pytest.mark.parametrize("kv", ["separate", "interleaved"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("scratch_blocks", [1, 2, 8])
def test_heads_are_put_into_the_order_of_the_cache(
    kv: KvArrangement, order: HeadOrder, scratch_blocks: int
) -> None:
    layout = replace(LAYOUT, kv=kv, order=order)
    part, stride = layout.part_bytes, layout.part_bytes + 32
    plane, ids = random_bytes(BLOCKS * stride), np.array([3, 1, 8], dtype=np.int32)
    on_device = of(plane)
    arrived: HeadOrder = "NHD" if order == "HND" else "HND"
    scratch = of(random_bytes(scratch_blocks * part))
    permute_heads(layout, on_device, stride, of(ids), arrived, scratch)
    outer, inner = layout.block_size, layout.heads_per_rank
    if arrived == "HND":
        outer, inner = inner, outer
    for begin in ids * stride:
        block = plane[begin : begin + part].reshape(-1, outer, inner, layout.vector_bytes)
        plane[begin : begin + part] = block.swapaxes(1, 2).ravel()
    assert np.array_equal(on_device.cpu().numpy(), plane)


def test_blocks_in_the_cache_s_own_order_are_left_as_they_are() -> None:
    plane = of(random_bytes(BLOCKS * LAYOUT.part_bytes))
    before = plane.clone()
    permute_heads(LAYOUT, plane, LAYOUT.part_bytes, of(np.zeros(1, np.int32)), "NHD", plane[:0])
    assert plane.equal(before)


def test_scratch_has_room_for_a_block() -> None:
    plane, ids = of(random_bytes(BLOCKS * LAYOUT.part_bytes)), of(np.zeros(1, np.int32))
    with pytest.raises(InvalidArgument, match=r"scratch of 1023 bytes for blocks of 1024"):
        permute_heads(LAYOUT, plane, LAYOUT.part_bytes, ids, "HND", of(random_bytes(1023)))
