"""vLLM's KV cache tensors as a KvCache, or a refusal that says what cannot be mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch

from kvxfer.errors import InvalidArgument
from kvxfer.kv.cache import KvCache
from kvxfer.layout import ITEM_BYTES, KvLayout

if TYPE_CHECKING:
    from kvxfer.engine import Engine


_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def packing_name(isa: str | None, cache_dtype: str) -> str:
    """The order of K and V within a head of a block, of the attention kernel that vLLM has chosen
    (`layer.isa`). With fp8 the AMX kernels decide once more, so that has a separate name."""
    if isa == "vec16":
        return "vec"
    return "amx-fp8" if isa == "amx" and cache_dtype in _FP8 else isa or ""


def in_model_order(caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layer by layer, by the numbers in their names: groups of layers lie side by side in vLLM."""

    def place(name: str) -> tuple[list[int], str]:
        return [int(part) for part in name.split(".") if part.isdecimal()], name

    return {name: caches[name] for name in sorted(caches, key=place)}


def layout_of(
    caches: Mapping[str, torch.Tensor],
    block_size: int,
    *,
    mla: bool,
    packing: str = "",
    cache_dtype: str = "auto",
    num_kv_heads: int | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    groups: Sequence[Sequence[str]] = (),
) -> KvLayout:
    """The layout of caches of one shape in host memory. `num_kv_heads` are those of the model,
    `groups` the names of the layers of each group of block ids.

    vLLM's CPU attention keeps `[num_blocks, heads, block_size, 2 * head_size]`, and within a head
    of a block the order that `packing` names; MLA keeps one latent vector per token. Raises
    InvalidArgument for everything else.
    """
    if not caches:
        raise InvalidArgument("vLLM registered no KV caches; a model without them needs no kvxfer")
    name, first = next(iter(caches.items()))
    for other, cache in caches.items():
        if (cache.shape, cache.dtype) != (first.shape, first.dtype):
            raise InvalidArgument(
                f"the KV cache of {other} is {list(cache.shape)} of {cache.dtype}, that of {name} "
                f"{list(first.shape)} of {first.dtype}; caches of several shapes cannot be moved"
            )
        if cache.device.type != "cpu" or not cache.is_contiguous():
            raise InvalidArgument(
                f"the KV cache of {other} is on {cache.device} with strides "
                f"{list(cache.stride())}; this connector moves contiguous host memory"
            )
    dtype = _FP8.get(cache_dtype, str(first.dtype).removeprefix("torch."))
    if dtype not in ITEM_BYTES:
        raise InvalidArgument(
            f"the KV cache of {name} is of {dtype}; use one of {', '.join(ITEM_BYTES)}"
        )
    heads, tokens = (1, first.shape[1]) if first.dim() == 3 else tuple(first.shape[1:3])
    width = first.shape[-1]
    if first.dim() not in (3, 4) or tokens != block_size or (mla and heads != 1):
        raise InvalidArgument(
            f"the KV cache of {name} is {list(first.shape)} with blocks of {block_size} tokens; "
            "there should be [blocks, heads, tokens, bytes of K and V]"
        )
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    layer_groups = tuple(group_of[name] for name in caches) if groups else ()
    if mla:
        return KvLayout(
            num_layers=len(caches),
            num_kv_heads=1,
            head_size=width,
            dtype=dtype,
            block_size=block_size,
            tp_size=tp_size,
            tp_rank=tp_rank,
            mla=True,
            layer_groups=layer_groups,
        )
    if first.dim() == 3 or width % 2:
        raise InvalidArgument(
            f"the KV cache of {name} is {list(first.shape)}, without K and V for each head"
        )
    layout = KvLayout(
        num_layers=len(caches),
        num_kv_heads=num_kv_heads or heads * tp_size,
        head_size=width // 2,
        dtype=dtype,
        block_size=block_size,
        tp_size=tp_size,
        tp_rank=tp_rank,
        order="HND",
        kv="opaque",
        packing=packing,
        layer_groups=layer_groups,
    )
    if layout.heads_per_rank != heads:
        raise InvalidArgument(
            f"the KV cache of {name} has {heads} heads, {layout.heads_per_rank} were expected of "
            f"{layout.num_kv_heads} over {tp_size} ranks; this model splits its heads otherwise"
        )
    return layout


def register_caches(
    engine: Engine, caches: Mapping[str, torch.Tensor], layout: KvLayout
) -> KvCache:
    """Registers the tensors, layer by layer; vLLM keeps the memory, which several layers share
    where they are in different groups."""
    memory = {tensor.data_ptr(): tensor.view(torch.uint8) for tensor in caches.values()}
    planes = [[memory[tensor.data_ptr()]] for tensor in caches.values()]
    num_blocks = next(iter(caches.values())).shape[0]
    return KvCache.register(engine, layout, num_blocks, planes)
