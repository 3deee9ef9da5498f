from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from kvxfer.kv.cache import KvCache, KvPlane, permute_on_host
from kvxfer.layout import HeadOrder, KvArrangement, KvLayout

from .steered import Engine
from .workers import heads_by_token

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_size=4, dtype="bfloat16", block_size=5)


@pytest.mark.parametrize("kv", ["separate", "interleaved", "joined"])
@pytest.mark.parametrize("arrived", ["NHD", "HND"])
def test_blocks_change_their_order_and_no_others_do(
    rng: random.Random, arrived: HeadOrder, kv: KvArrangement
) -> None:
    own: HeadOrder = "HND" if arrived == "NHD" else "NHD"
    engine: Any = Engine("e")
    cache = KvCache.allocate(engine, dataclasses.replace(LAYOUT, order=own, kv=kv), 8)
    data = cache.planes[0][0].region.data  # type: ignore[attr-defined]
    data[:] = np.frombuffer(rng.randbytes(len(data)), np.uint8)
    before = data.copy()
    cache.layout = dataclasses.replace(cache.layout, order=arrived)
    as_it_arrived = heads_by_token(cache, [6, 1, 3])
    cache.layout = dataclasses.replace(cache.layout, order=own)
    permute_on_host(cache, np.array([6, 1, 3], np.int32), arrived)
    np.testing.assert_array_equal(heads_by_token(cache, [6, 1, 3]), as_it_arrived)
    others = [0, 2, 4, 5, 7]
    for plane in (plane for layer in cache.planes for plane in layer):
        span = slice(plane.offset, plane.offset + 8 * plane.block_stride)
        was, now = (memory[span].reshape(8, -1) for memory in (before, data))
        np.testing.assert_array_equal(now[others], was[others])
        assert (now[[6, 1, 3]] != was[[6, 1, 3]]).any()


def test_bytes_between_the_blocks_of_a_plane_do_not_change(rng: random.Random) -> None:
    layout = dataclasses.replace(LAYOUT, num_layers=1, kv="interleaved", order="HND")
    engine: Any = Engine("e")
    gap, size = 16, layout.block_bytes
    region = engine.alloc(3 * (size + gap)).region
    region.data[:] = np.frombuffer(rng.randbytes(region.nbytes), np.uint8)
    cache = KvCache(layout, 3, [[KvPlane(region, gap, size + gap)]])
    before = region.data.copy()
    permute_on_host(cache, np.arange(3, dtype=np.int32), "NHD")
    rows = region.data.reshape(3, -1), before.reshape(3, -1)
    np.testing.assert_array_equal(rows[0][:, :gap], rows[1][:, :gap])
    assert (rows[0][:, gap:] != rows[1][:, gap:]).any()


def test_many_blocks_are_done_piece_by_piece(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = dataclasses.replace(LAYOUT, order="HND")
    engine: Any = Engine("e")
    cache = KvCache.allocate(engine, layout, 9)
    data = cache.planes[0][0].region.data  # type: ignore[attr-defined]
    data[:] = np.frombuffer(rng.randbytes(len(data)), np.uint8)
    start, ids = data.copy(), np.arange(9, dtype=np.int32)
    permute_on_host(cache, ids, "NHD")
    at_once = data.copy()
    data[:] = start
    monkeypatch.setattr("kvxfer.kv.cache._CHUNK_BYTES", 2 * layout.part_bytes)
    permute_on_host(cache, ids, "NHD")
    np.testing.assert_array_equal(data, at_once)
