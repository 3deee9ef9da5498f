from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.connectors.vllm.caches import (
    form_name,
    has_slots,
    in_model_order,
    layout_of,
    packing_name,
    register_caches,
    require_movable,
)
from kvxfer.engine import Engine
from kvxfer.errors import InvalidArgument
from kvxfer.layout import KvLayout

pytestmark = pytest.mark.native


def caches(*shape: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    return {f"layer.{index}": torch.zeros(shape, dtype=dtype) for index in range(3)}


async def test_heads_of_vllms_cpu_attention_are_opaque() -> None:
    tensors = caches(9, 4, 32, 2 * 64)
    layout = layout_of(tensors, 32, mla=False)
    assert (layout.kv, layout.order, layout.num_kv_heads) == ("opaque", "HND", 4)
    assert (layout.num_layers, layout.head_size, layout.dtype) == (3, 64, "bfloat16")
    assert layout.part_bytes == tensors["layer.0"][0].nbytes
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            assert cache.num_blocks == 9
            assert cache.plane(2, "KV").region.address == tensors["layer.2"].data_ptr()


def test_the_heads_of_a_rank_are_a_part_of_the_models() -> None:
    layout = layout_of(caches(9, 4, 32, 128), 32, mla=False, num_kv_heads=8, tp_size=2, tp_rank=1)
    assert (layout.num_kv_heads, layout.heads_per_rank, layout.first_head) == (8, 4, 4)
    with pytest.raises(InvalidArgument, match="has 4 heads, 2 were expected of 8 over 4 ranks"):
        layout_of(caches(9, 4, 32, 128), 32, mla=False, num_kv_heads=8, tp_size=4)


@pytest.mark.parametrize(
    ("isa", "cache_dtype", "name"),
    [
        ("vec", "auto", "vec"),
        ("vec16", "auto", "vec"),
        ("vec", "fp8_e5m2", "vec"),
        ("amx", "auto", "amx"),
        ("amx", "fp8", "amx-fp8"),
        ("neon", "auto", "neon"),
        (None, "auto", ""),
    ],
)
def test_the_order_within_a_head_has_the_name_of_its_kernel(
    isa: str | None, cache_dtype: str, name: str
) -> None:
    assert packing_name(isa, cache_dtype) == name


def test_fp8_caches_are_named_by_what_they_hold() -> None:
    tensors = caches(9, 4, 32, 128, dtype=torch.uint8)
    assert layout_of(tensors, 32, mla=False, cache_dtype="fp8_e5m2").dtype == "float8_e5m2"
    assert layout_of(tensors, 32, mla=False, cache_dtype="fp8").dtype == "float8_e4m3fn"


@pytest.mark.parametrize("shape", [(9, 1, 16, 576), (9, 16, 576)])
def test_mla_has_one_latent_vector_per_token(shape: tuple[int, ...]) -> None:
    layout = layout_of(caches(*shape), 16, mla=True)
    assert (layout.mla, layout.head_size, layout.num_kv_heads) == (True, 576, 1)
    assert layout.part_bytes == 16 * 576 * 2


@pytest.mark.parametrize(
    ("tensors", "named"),
    [
        ({}, "registered no KV caches"),
        (caches(9, 4, 16, 128), r"\[9, 4, 16, 128\] with blocks of 32 tokens"),
        (caches(9, 4, 32, 127), "without K and V"),
        (caches(9, 32, 128), "without K and V"),
        (caches(2, 9, 4, 32, 64), "there should be"),
        (caches(9, 4, 32, 128, dtype=torch.float64), "float64"),
        (caches(9, 4, 32, 128) | {"odd": torch.zeros(9, 2, 32, 128)}, "several shapes"),
        ({"layer": torch.zeros(9, 4, 32, 256)[..., ::2]}, "do not lie together"),
    ],
)
def test_what_cannot_be_mapped_is_refused(tensors: dict[str, torch.Tensor], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        layout_of(tensors, 32, mla=False)


async def test_layers_of_several_groups_share_their_memory() -> None:
    one, other = torch.zeros(4, 2, 32, 64), torch.zeros(4, 2, 32, 64)
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.2.attn"]
    tensors = in_model_order(dict(zip(names, (one, one, other), strict=True)))
    assert list(tensors) == names[::-1]
    layout = layout_of(tensors, 32, mla=False, groups=[names[1:], names[:1]])
    assert (layout.layer_groups, layout.num_groups) == ((0, 0, 1), 2)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            regions = [cache.plane(layer, "KV").region for layer in range(3)]
            assert regions[1] is regions[2]
            addresses = [region.address for region in regions]
            assert addresses == [tensor.data_ptr() for tensor in tensors.values()]


async def test_an_allocation_with_all_layers_is_registered_once() -> None:
    buffer = torch.zeros(3 * 4 * 2 * 32 * 64 * 2, dtype=torch.int8)
    layers = buffer.view(torch.bfloat16).view(3, 4, 2, 32, 64)
    tensors = {f"layers.{index}": layers[index] for index in range(3)}
    layout = layout_of(tensors, 32, mla=False)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            planes = [cache.plane(layer, "KV") for layer in range(3)]
            assert planes[0].region is planes[1].region is planes[2].region
            for plane, tensor in zip(planes, tensors.values(), strict=True):
                assert plane.region.address + plane.offset == tensor.data_ptr()
                assert plane.block_stride == tensor[0].nbytes


def views(order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Two layers of 5 blocks, 2 heads, 8 tokens and 64 of content; `order`: these five dimensions
    from the outermost to the innermost in memory."""
    sizes = (2, 5, 2, 8, 64)
    memory = torch.zeros([sizes[dim] for dim in order], dtype=torch.bfloat16)
    logical = memory.permute([order.index(dim) for dim in range(5)])
    return {f"layers.{index}": logical[index] for index in range(2)}


@pytest.mark.parametrize(
    ("order", "heads", "block_stride"),
    [
        ((0, 1, 3, 2, 4), "NHD", 2048),  # LBNHC
        ((0, 1, 2, 3, 4), "HND", 2048),
        ((1, 0, 3, 2, 4), "NHD", 4096),  # BLNHC
        ((1, 0, 2, 3, 4), "HND", 4096),
    ],
)
async def test_the_layouts_of_vllms_gpu_backends(
    order: tuple[int, ...], heads: str, block_stride: int
) -> None:
    tensors = views(order)
    layout = layout_of(tensors, 8, mla=False, opaque=False, num_kv_heads=4, tp_size=2)
    assert (layout.kv, layout.order, layout.head_size) == ("joined", heads, 64)
    assert layout.part_bytes == 2048
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            for plane, tensor in zip(
                (cache.plane(0, "KV"), cache.plane(1, "KV")), tensors.values(), strict=True
            ):
                assert plane.region.address + plane.offset == tensor.data_ptr()
                assert plane.block_stride == block_stride


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (1, 2, 0, 3, 4)], ids=["LHBNC", "BHLNC"])
def test_a_layout_that_scatters_blocks_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="set VLLM_KV_CACHE_LAYOUT to LBHNC"):
        layout_of(views(order), 8, mla=False, opaque=False)


def test_layers_in_two_orders_are_refused() -> None:
    mixed = {"one": views((0, 1, 2, 3, 4))["layers.0"], "two": views((0, 1, 3, 2, 4))["layers.0"]}
    with pytest.raises(InvalidArgument, match="of two are NHD, those of one HND; set VLLM_KV"):
        layout_of(mixed, 8, mla=False, opaque=False)


def test_blocks_with_slots_instead_of_heads_are_moved_as_they_are() -> None:
    def layout(order: tuple[int, ...], tp_size: int = 2) -> KvLayout:
        return layout_of(
            views(order), 8, mla=False, opaque=False, slots=True, packing="B12X", tp_size=tp_size
        )

    hnd, nhd = layout((0, 1, 2, 3, 4)), layout((0, 1, 3, 2, 4))
    assert (hnd.kv, hnd.heads_per_rank, hnd.part_bytes) == ("opaque", 1, 2048)
    assert hnd.packings is None, "blocks of other sizes do not fit"
    # Nor do blocks in another order, or of another number of ranks.
    assert (hnd.packing, nhd.packing) == ("B12X HND", "B12X NHD")
    assert hnd.num_kv_heads != layout((0, 1, 2, 3, 4), tp_size=1).num_kv_heads


def test_forms_of_their_own_have_names() -> None:
    assert [form_name(dtype) for dtype in ("auto", "bfloat16", "fp8", "fp8_e5m2")] == [""] * 4
    assert form_name("int8_per_token_head") == "int8_per_token_head"


def test_slots_are_those_of_any_layer() -> None:
    def config(*specs: object) -> Any:
        return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=of) for of in specs])

    plain = SimpleNamespace(num_head_slots=None)
    slots = SimpleNamespace(num_head_slots=2)
    assert not has_slots(config(plain, SimpleNamespace()))
    assert has_slots(config(plain, slots))
    assert has_slots(config(SimpleNamespace(kv_cache_specs={"a": plain, "b": slots})))


def test_memory_that_cannot_be_moved_or_goes_away_is_refused_by_name() -> None:
    def require(*, cuda: bool, sleeps: bool) -> None:
        config: Any = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))
        require_movable(config, SimpleNamespace(is_cuda=lambda: cuda, device_name="rocm"))

    require(cuda=True, sleeps=False)
    with pytest.raises(InvalidArgument, match="vLLM runs on rocm; kvxfer moves"):
        require(cuda=False, sleeps=False)
    with pytest.raises(InvalidArgument, match="--enable-sleep-mode takes the KV cache's memory"):
        require(cuda=True, sleeps=True)
