from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvxfer.engine import Engine
from kvxfer.errors import InvalidArgument
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.cache import KvCache, KvPlane
from kvxfer.kv.connection import grant_ranges
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout

from .workers import KEY

pytestmark = pytest.mark.native

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_size=8, dtype="float32", block_size=4)
PART = LAYOUT.part_bytes
GROUPED = replace(LAYOUT, layer_groups=(0, 1))


async def test_an_allocated_cache_lays_plane_after_plane() -> None:
    async with Engine(cluster_key=KEY, name="e", fabrics=("local",)) as engine:
        with KvCache.allocate(engine, LAYOUT, 5) as cache:
            assert [
                (plane.offset, plane.block_stride) for layer in cache.planes for plane in layer
            ] == [(index * 5 * PART, PART) for index in range(4)]
            assert cache.plane(1, "V") is cache.planes[1][1]
            plane = cache.buffer(1, "K")
            assert (len(plane), plane.readonly) == (5 * PART, False)
            plane[:] = b"\7" * len(plane)
            assert set(cache.buffer(0, "V")) == {0}
            assert set(cache.buffer(1, "K")) == {7}
            whole = np.from_dlpack(cache.memory)
            begin = cache.plane(1, "K").offset
            assert set(np.flatnonzero(whole)) == set(range(begin, begin + 5 * PART))
            del plane, whole


async def test_a_cache_is_registered_over_the_callers_arrays() -> None:
    arrays = [[np.zeros((5, 4, 2, 8), dtype=np.float32) for _ in LAYOUT.parts] for _ in range(2)]
    async with Engine(cluster_key=KEY, name="e", fabrics=("local",)) as engine:
        with KvCache.register(engine, LAYOUT, 5, arrays) as cache:
            for layer, planes in zip(arrays, cache.planes, strict=True):
                for array, plane in zip(layer, planes, strict=True):
                    assert (plane.offset, plane.block_stride) == (0, PART)
                    assert plane.region.address == array.ctypes.data
                    assert plane.region.nbytes == array.nbytes
            with pytest.raises(InvalidArgument, match="use those arrays"):
                cache.buffer(0, "K")
            with pytest.raises(InvalidArgument, match="use those arrays"):
                _ = cache.memory


async def test_arrays_that_do_not_fit_the_layout_are_refused() -> None:
    small = [[np.zeros((4, 4, 2, 8), np.float32) for _ in LAYOUT.parts] for _ in range(2)]
    async with Engine(cluster_key=KEY, name="e", fabrics=("local",)) as engine:
        with pytest.raises(InvalidArgument, match="a block of this layout takes 256 bytes"):
            KvCache.register(engine, LAYOUT, 5, small)
        with pytest.raises(InvalidArgument, match="planes for 1 layers, its layout has 2"):
            KvCache.register(engine, LAYOUT, 4, small[:1])
        with pytest.raises(InvalidArgument, match=r"layer 0 of the KvCache has 1 planes.*\(K, V\)"):
            KvCache.register(engine, LAYOUT, 4, [[small[0][0]], [small[1][0]]])


class _Region:
    nbytes = 10 * PART

    def __init__(self, gpu: int | None = None) -> None:
        self.gpu = gpu


@pytest.mark.parametrize(
    ("offset", "stride", "num_blocks", "named"),
    [
        (0, PART, 11, f"ends at byte {11 * PART} of a memory region of {10 * PART} bytes"),
        (1, PART, 10, f"plane K of layer 0 ends at byte {10 * PART + 1}"),
        (0, 2 * PART, 6, f"ends at byte {11 * PART}"),
        (0, PART - 1, 2, f"block stride {PART - 1}"),
        (-1, PART, 2, "offset -1"),
        (0, PART, 0, "KvCache of 0 blocks"),
    ],
)
def test_a_plane_that_leaves_its_region_is_named(
    offset: int, stride: int, num_blocks: int, named: str
) -> None:
    region: Any = _Region()
    planes = [[KvPlane(region, offset, stride)] * 2] * 2
    with pytest.raises(InvalidArgument, match=named):
        KvCache(LAYOUT, num_blocks, planes)


def test_a_cache_names_the_gpu_of_its_planes() -> None:
    host: Any = _Region()
    device: Any = _Region(gpu=3)
    planes = [[KvPlane(host, 0, PART), KvPlane(region, 0, PART)] for region in (host, device)]
    assert KvCache(LAYOUT, 10, planes).gpu == 3
    assert KvCache(LAYOUT, 10, planes[:1] * 2).gpu is None


def test_a_plane_may_end_with_its_region() -> None:
    region: Any = _Region()
    assert KvCache(LAYOUT, 10, [[KvPlane(region, 0, PART)] * 2] * 2).num_blocks == 10


def _cache(*ids: range | None, layout: KvLayout = GROUPED, num_blocks: int = 10) -> KvCache:
    region: Any = _Region()
    planes = [[KvPlane(region, 0, PART, of_layer)] * 2 for of_layer in ids]
    return KvCache(layout, num_blocks, planes)


def test_groups_that_share_no_memory_have_separate_ids() -> None:
    cache = _cache(range(4), range(4, 10))
    plane = cache.planes[1][0]
    assert plane.places(np.array([ABSENT, 4, 9], np.int32)).tolist() == [ABSENT, 0, 5]
    table = np.array([[1, 3], [ABSENT, 5]], np.int32)
    ranges = grant_ranges(cache, plan_transfer(GROUPED, GROUPED), table)
    assert [(offset, nbytes) for _, offset, nbytes in ranges] == [(PART, 3 * PART)] * 2 + [
        (PART, PART)
    ] * 2


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ((range(4), range(4, 11)), "has blocks range.4, 11.; pass a range of the ids 0 to 9"),
        ((range(4), range(4, 4)), "pass a range of the ids"),
        ((range(-1, 4), range(4, 10)), "pass a range of the ids"),
    ],
)
def test_ids_outside_of_the_cache_are_refused(ids: tuple[range, range], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        _cache(*ids)


def test_layers_of_a_group_have_the_same_ids() -> None:
    with pytest.raises(InvalidArgument, match="layers of a group share their ids"):
        _cache(range(5), range(4), layout=LAYOUT)
