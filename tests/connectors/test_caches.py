from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvxfer.connectors.vllm.caches import (
    LayerCache,
    form_name,
    heads_in_all,
    in_model_order,
    layout_of,
    packing_name,
    register_caches,
    require_movable,
)
from kvxfer.connectors.vllm.whole_blocks import as_whole_blocks
from kvxfer.engine import Engine
from kvxfer.errors import InvalidArgument, LayoutMismatch
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout, LayerShape

pytestmark = pytest.mark.native


def caches(*shape: int, dtype: torch.dtype = torch.bfloat16, **said: Any) -> dict[str, LayerCache]:
    """Three layers of `[blocks, heads, tokens, content]`, whose ranks have all heads."""
    heads = shape[1]
    return {
        f"layer.{index}": LayerCache(
            torch.zeros(shape, dtype=dtype), **{"num_kv_heads": heads} | said
        )
        for index in range(3)
    }


async def test_heads_of_vllms_cpu_attention_are_opaque() -> None:
    tensors = caches(9, 4, 32, 2 * 64)
    layout = layout_of(tensors, 32)
    assert (layout.kv, layout.order, layout.num_kv_heads) == ("opaque", "HND", 4)
    assert (layout.num_layers, layout.head_size, layout.dtype) == (3, 64, "bfloat16")
    assert layout.part_bytes == tensors["layer.0"].tensor[0].nbytes
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            assert cache.num_blocks == 9
            assert cache.plane(2, "KV").region.address == tensors["layer.2"].tensor.data_ptr()


def test_the_heads_of_a_rank_are_a_part_of_the_models() -> None:
    halves = caches(9, 4, 32, 128, num_kv_heads=8)
    layout = layout_of(halves, 32, tp_size=2, tp_rank=1)
    assert (layout.num_kv_heads, layout.heads_per_rank, layout.first_head) == (8, 4, 4)
    with pytest.raises(InvalidArgument, match="has 4 heads, 2 were expected of 8 over 4 ranks"):
        layout_of(halves, 32, tp_size=4)


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


def test_fp8_caches_have_the_name_of_their_format() -> None:
    tensors = caches(9, 4, 32, 128, dtype=torch.uint8)
    assert layout_of(tensors, 32, cache_dtype="fp8_e5m2").dtype == "float8_e5m2"
    assert layout_of(tensors, 32, cache_dtype="fp8").dtype == "float8_e4m3fn"


@pytest.mark.parametrize("shape", [(9, 1, 16, 576), (9, 16, 576)])
def test_mla_has_one_latent_vector_per_token(shape: tuple[int, ...]) -> None:
    layout = layout_of(caches(*shape, mla=True), 16)
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
        (
            caches(9, 4, 32, 128) | {"odd": LayerCache(torch.zeros(8, 4, 32, 128), 4)},
            "odd has 8 blo",
        ),
        ({"layer": LayerCache(torch.zeros(9, 4, 32, 256)[..., ::2], 4)}, "do not lie together"),
    ],
)
def test_caches_that_cannot_be_mapped_are_refused(
    tensors: dict[str, LayerCache], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        layout_of(tensors, 32)


def test_layers_may_have_larger_blocks_than_the_layout() -> None:
    """Gemma 4 has such layers, with pages of one size."""
    large = LayerCache(torch.zeros(9, 2, 64, 64), 2, block_size=64)
    small = LayerCache(torch.zeros(9, 2, 32, 128), 2, block_size=32)
    tensors = {"layers.0.attn": large, "layers.1.attn": small}
    layout = layout_of(tensors, 32, groups=[["layers.0.attn"], ["layers.1.attn"]])
    assert (layout.head_size, layout.shapes[0].head_size, layout.layer_shapes) == (64, 32, (1, 0))
    assert [layer.block_size for layer in layout.of_layers] == [64, 32]
    assert layout.of_layer(0).part_bytes == layout.of_layer(1).part_bytes == 2 * 32 * 128 * 4
    with pytest.raises(InvalidArgument, match="no layer has blocks of 32 tokens, the smallest ha"):
        layout_of({"layers.0.attn": large}, 32)
    with pytest.raises(InvalidArgument, match="into different groups"):
        layout_of(tensors, 32)


async def test_layers_of_several_groups_share_their_memory() -> None:
    one, other = torch.zeros(4, 2, 32, 64), torch.zeros(4, 2, 32, 64)
    names = ["model.layers.10.attn", "model.layers.9.attn", "model.layers.2.attn"]
    kept = [LayerCache(tensor, 2) for tensor in (one, one, other)]
    tensors = in_model_order(dict(zip(names, kept, strict=True)))
    assert list(tensors) == names[::-1]
    layout = layout_of(tensors, 32, groups=[names[1:], names[:1]])
    assert (layout.layer_groups, layout.num_groups) == ((0, 0, 1), 2)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            regions = [cache.plane(layer, "KV").region for layer in range(3)]
            assert regions[1] is regions[2]
            addresses = [region.address for region in regions]
            assert addresses == [cache.tensor.data_ptr() for cache in tensors.values()]


STATE = LayerShape(4, 96, "uint8", "HND", "state", packing="MAMBA2 SD float32", sections=(36, 60))


async def test_states_come_last_and_without_the_padding_of_their_pages() -> None:
    pages = torch.zeros(4, 1024, dtype=torch.int8)[:, : 2 * 96].view(4, 1, 1, 192)
    heads = torch.zeros(4, 2, 32, 64)
    tensors = in_model_order(
        {
            "layers.0.mixer": LayerCache(pages, state=STATE),
            "layers.1.attn": LayerCache(heads, 4),
        }
    )
    assert list(tensors) == ["layers.1.attn", "layers.0.mixer"]
    groups = [["layers.0.mixer"], ["layers.1.attn"]]
    layout = layout_of(tensors, 32, tp_size=2, groups=groups)
    assert (layout.kv, layout.shapes, layout.layer_shapes) == ("opaque", (STATE,), (0, 1))
    assert (layout.layer_groups, layout.of_layer(1).block_bytes) == ((1, 0), 192)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as cache:
            assert cache.plane(1, "KV").block_stride == 1024


@pytest.mark.parametrize(
    "pages", [torch.zeros(4, 1, 1, 95), torch.zeros(4, 1, 192, 1, dtype=torch.int8)[:, :, ::2]]
)
def test_a_state_of_another_size_is_refused(pages: torch.Tensor) -> None:
    named = r"the state of layer is \[4, 1, .*there should be 96 bytes that lie together"
    with pytest.raises(InvalidArgument, match=named):
        layout_of({"layer": LayerCache(pages, state=dataclasses.replace(STATE, num_kv_heads=1))}, 8)


async def test_an_allocation_with_all_layers_is_registered_once() -> None:
    buffer = torch.zeros(3 * 4 * 2 * 32 * 64 * 2, dtype=torch.int8)
    layers = buffer.view(torch.bfloat16).view(3, 4, 2, 32, 64)
    tensors = {f"layers.{index}": LayerCache(layers[index], 2) for index in range(3)}
    layout = layout_of(tensors, 32)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as registered:
            planes = [registered.plane(layer, "KV") for layer in range(3)]
            assert planes[0].region is planes[1].region is planes[2].region
            for plane, cache in zip(planes, tensors.values(), strict=True):
                assert plane.region.address + plane.offset == cache.tensor.data_ptr()
                assert plane.block_stride == cache.tensor[0].nbytes


def views(
    order: tuple[int, ...], heads: int | None = 4, packing: str = ""
) -> dict[str, LayerCache]:
    """Two layers of 5 blocks, 2 heads, 8 tokens and 64 of content, as a rank of a model with
    `heads` has them; `order` has these five dimensions from the outermost to the innermost in
    memory."""
    sizes = (2, 5, 2, 8, 64)
    memory = torch.zeros([sizes[dim] for dim in order], dtype=torch.bfloat16)
    logical = memory.permute([order.index(dim) for dim in range(5)])
    return {
        f"layers.{index}": LayerCache(logical[index], heads, packing=packing) for index in range(2)
    }


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
    layout = layout_of(tensors, 8, opaque=False, tp_size=2)
    assert (layout.kv, layout.order, layout.head_size) == ("joined", heads, 64)
    assert layout.part_bytes == 2048
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, tensors, layout) as registered:
            for layer, cache in enumerate(tensors.values()):
                plane = registered.plane(layer, "KV")
                assert plane.region.address + plane.offset == cache.tensor.data_ptr()
                assert plane.block_stride == block_stride


@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (1, 2, 0, 3, 4)], ids=["LHBNC", "BHLNC"])
def test_a_layout_that_scatters_blocks_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="set VLLM_KV_CACHE_LAYOUT to LBHNC"):
        layout_of(views(order, heads=2), 8, opaque=False)


def test_layers_may_have_different_shapes() -> None:
    """A draft model with heads, and the indexer of sparse MLA, which has another dtype."""
    tensors = {
        "model.layers.0.attn": LayerCache(
            torch.zeros(5, 1, 8, 576, dtype=torch.bfloat16), 1, mla=True
        ),
        "model.layers.0.indexer": LayerCache(
            torch.zeros(5, 1, 8, 132, dtype=torch.uint8), 1, mla=True
        ),
        "model.layers.1.attn": LayerCache(
            torch.zeros(5, 1, 8, 576, dtype=torch.bfloat16), 1, mla=True
        ),
        "draft.layers.0.attn": views((0, 1, 3, 2, 4))["layers.0"],
    }
    layout = layout_of(tensors, 8, opaque=False, tp_size=2)
    assert (layout.mla, layout.head_size, layout.layer_shapes) == (True, 576, (0, 1, 0, 2))
    indexer, draft = layout.shapes
    assert (indexer.mla, indexer.head_size, indexer.dtype) == (True, 132, "uint8")
    assert (draft.num_kv_heads, draft.order, draft.kv) == (4, "NHD", "joined")
    kept = [cache.tensor[0].nbytes for cache in tensors.values()]
    assert [layout.of_layer(layer).block_bytes for layer in range(4)] == kept
    assert layout.stack_bytes == sum(kept)
    # The dtype of an fp8 cache applies to layers with elements of one byte.
    mixed = layout_of(tensors, 8, opaque=False, cache_dtype="fp8", tp_size=2)
    assert [mixed.of_layer(layer).dtype for layer in (0, 1)] == ["bfloat16", "float8_e4m3fn"]


def whole(tensors: dict[str, LayerCache], **more: Any) -> KvLayout:
    layout = layout_of(tensors, 8, opaque=False, tp_size=2, **more)
    return layout_of(as_whole_blocks(tensors, layout), 8, opaque=False, tp_size=2)


async def test_all_layers_of_a_block_are_one_write_if_they_are_contiguous() -> None:
    tensors = views((1, 0, 2, 3, 4))
    layout = whole(tensors)
    assert (layout.num_layers, layout.part_bytes) == (1, 2 * 2048)
    [layer] = plan_transfer(layout, layout).layers
    assert [(copy.length, copy.count) for copy in layer.copies] == [(4096, 1)]
    one = as_whole_blocks(tensors, layout)
    async with Engine(cluster_key=b"0123456789abcdef", fabrics=("local",)) as engine:
        with register_caches(engine, one, layout) as cache:
            plane = cache.plane(0, "KV")
            assert plane.block_stride == 4096
            assert plane.region.address + plane.offset == tensors["layers.0"].tensor.data_ptr()


def test_whole_blocks_are_moved_between_equal_layouts_only() -> None:
    layout = whole(views((1, 0, 2, 3, 4)))
    other = whole(views((1, 0, 3, 2, 4)))
    with pytest.raises(LayoutMismatch, match=r"packing is 'whole .*' at prefill and 'whole"):
        plan_transfer(layout, other)
    turned = dict(reversed(views((1, 0, 2, 3, 4)).items()))
    with pytest.raises(LayoutMismatch, match="packing is"):
        plan_transfer(layout, whole(turned))
    with pytest.raises(InvalidArgument, match="do not lie side by side; set VLLM_KV_CACHE_LAYOUT"):
        whole(views((0, 1, 2, 3, 4)))
    with pytest.raises(InvalidArgument, match="whole_blocks is set, and the model has 2 KV cache"):
        whole(views((1, 0, 2, 3, 4)), groups=[["layers.0"], ["layers.1"]])


def test_heads_are_those_of_the_model_or_its_draft() -> None:
    assert heads_in_all(2, [8, 4], 4) == 8
    assert heads_in_all(1, [8, 2], 4) == 2, "each head is there twice"
    assert heads_in_all(3, [8, 2], 4) is None
    assert heads_in_all(3, [8, 2], 1) == 3
    assert heads_in_all(1, [4, 2], 4) is None, "one of 4, or one of 2 that is there twice"


def test_blocks_with_slots_instead_of_heads_are_moved_unchanged() -> None:
    def layout(order: tuple[int, ...], tp_size: int = 2) -> KvLayout:
        return layout_of(views(order, None, "B12X"), 8, opaque=False, tp_size=tp_size)

    hnd, nhd = layout((0, 1, 2, 3, 4)), layout((0, 1, 3, 2, 4))
    assert (hnd.kv, hnd.heads_per_rank, hnd.part_bytes) == ("opaque", 1, 2048)
    assert hnd.packings is None, "blocks of other sizes do not fit"
    # Blocks in another order, or with another number of ranks, do not fit either.
    assert (hnd.packing, nhd.packing) == ("B12X HND", "B12X NHD")
    assert hnd.num_kv_heads != layout((0, 1, 2, 3, 4), tp_size=1).num_kv_heads


def test_special_forms_have_names() -> None:
    assert [form_name(dtype) for dtype in ("auto", "bfloat16", "fp8", "fp8_e5m2")] == [""] * 4
    assert form_name("int8_per_token_head") == "int8_per_token_head"


def test_memory_that_cannot_be_moved_or_is_taken_away_is_refused() -> None:
    def require(*, cuda: bool, sleeps: bool, backend: str = "cumem") -> None:
        model = SimpleNamespace(enable_sleep_mode=sleeps, sleep_mode_backend=backend)
        config: Any = SimpleNamespace(model_config=model)
        require_movable(config, SimpleNamespace(is_cuda=lambda: cuda, device_name="rocm"))

    require(cuda=True, sleeps=False)
    with pytest.raises(InvalidArgument, match="vLLM runs on rocm; kvxfer moves"):
        require(cuda=False, sleeps=False)
    with pytest.raises(InvalidArgument, match="with --sleep-mode-backend kvxfer"):
        require(cuda=True, sleeps=True)
    require(cuda=True, sleeps=True, backend="kvxfer")
