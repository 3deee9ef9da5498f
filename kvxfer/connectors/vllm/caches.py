"""vLLM's KV cache tensors as a KvCache, or a refusal that says what cannot be mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import InvalidArgument
from kvxfer.kv.cache import KvCache, KvPlane, permute_on_host
from kvxfer.layout import ITEM_BYTES, HeadOrder, KvLayout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvxfer.engine import Engine, MemoryRegion


_PLAIN: Final = ("auto", "float16", "bfloat16")
_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def packing_name(isa: str | None, cache_dtype: str) -> str:
    """The order of K and V within a head of a block, of the attention kernel that vLLM has chosen
    (`layer.isa`). With fp8 the AMX kernels decide once more, so that has a separate name."""
    if isa == "vec16":
        return "vec"
    return "amx-fp8" if isa == "amx" and cache_dtype in _FP8 else isa or ""


def form_name(cache_dtype: str) -> str:
    """Of what a GPU backend keeps of a head of a token, where that is more than K and V."""
    return "" if cache_dtype in _PLAIN or cache_dtype in _FP8 else cache_dtype


def has_slots(config: KVCacheConfig) -> bool:
    """Whether a block has slots of the attention backend's own in the place of heads."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    each = [one for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    return any(getattr(spec, "num_head_slots", None) is not None for spec in each)


def require_movable(config: VllmConfig, platform: Any) -> None:
    """Raises InvalidArgument where the memory of the device cannot be moved, or goes away."""
    if not platform.is_cuda():
        raise InvalidArgument(
            f"vLLM runs on {platform.device_name}; kvxfer moves KV caches of CPUs and CUDA GPUs"
        )
    if config.model_config.enable_sleep_mode:
        raise InvalidArgument(
            "--enable-sleep-mode takes the KV cache's memory away while peers may write into it; "
            "start the server without it"
        )


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
    opaque: bool = True,
    slots: bool = False,
    packing: str = "",
    cache_dtype: str = "auto",
    num_kv_heads: int | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    groups: Sequence[Sequence[str]] = (),
) -> KvLayout:
    """The layout of caches of one shape. `num_kv_heads` are those of the model, `groups` the names
    of the layers of each group of block ids.

    vLLM keeps `[num_blocks, heads, block_size, content]`, whatever the order in memory: content is
    K and V of a head of a token, in the form that `packing` names where that is its own (scales).
    vLLM's CPU attention (`opaque`) has a separate order within a head of a block. Where a backend
    has `slots` in the place of heads, a block is moved as it is. MLA keeps one latent vector per
    token. Raises InvalidArgument for everything else.
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
            "there should be [blocks, heads, tokens, bytes of K and V]. If the attention kernel "
            "divides blocks, set --block-size to a size that it takes whole"
        )
    orders = {other: _order_of(other, cache, opaque) for other, cache in caches.items()}
    order = orders[name]
    if mixed := [other for other in orders if orders[other] != order]:
        raise InvalidArgument(
            f"the heads of a block of {mixed[0]} are {orders[mixed[0]]}, those of {name} {order}; "
            "set VLLM_KV_CACHE_LAYOUT to LBHNC"
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
    if first.dim() == 3 or (opaque and width % 2) or (slots and heads % 2):
        raise InvalidArgument(
            f"the KV cache of {name} is {list(first.shape)}, without K and V for each head"
        )
    if slots:
        return KvLayout(
            num_layers=len(caches),
            num_kv_heads=tp_size,
            head_size=heads * width // 2,
            dtype=dtype,
            block_size=block_size,
            tp_size=tp_size,
            tp_rank=tp_rank,
            order="HND",
            kv="opaque",
            packing=f"{packing} {order}",
            layer_groups=layer_groups,
        )
    layout = KvLayout(
        num_layers=len(caches),
        num_kv_heads=num_kv_heads or heads * tp_size,
        head_size=width // 2 if opaque else width,
        dtype=dtype,
        block_size=block_size,
        tp_size=tp_size,
        tp_rank=tp_rank,
        order=order,
        kv="opaque" if opaque else "joined",
        packing=packing,
        layer_groups=layer_groups,
    )
    if layout.heads_per_rank != heads:
        raise InvalidArgument(
            f"the KV cache of {name} has {heads} heads, {layout.heads_per_rank} were expected of "
            f"{layout.num_kv_heads} over {tp_size} ranks; this model splits its heads otherwise"
        )
    return layout


def _order_of(name: str, cache: torch.Tensor, opaque: bool) -> HeadOrder:
    """The order of heads and tokens in a block, whose bytes have to lie together."""
    block = cache if opaque else cache[0]
    if block.is_contiguous():
        return "HND"
    if not opaque and cache.dim() == 4 and cache[0].transpose(0, 1).is_contiguous():
        return "NHD"
    raise InvalidArgument(
        f"the KV cache of {name} is {list(cache.shape)} with strides {list(cache.stride())}: the "
        "bytes of a block do not lie together; set VLLM_KV_CACHE_LAYOUT to LBHNC, LBNHC, BLHNC or "
        "BLNHC"
    )


def register_caches(
    engine: Engine, caches: Mapping[str, torch.Tensor], layout: KvLayout
) -> KvCache:
    """Registers what the tensors lie in, once: in vLLM all layers lie in one allocation, and some
    share memory where they are in different groups. vLLM keeps the memory. CUDA's driver says
    whether it is that of a GPU, and not `tensor.device`.

    On a GPU no heads are reordered after arrival: in different orders they go one by one.
    """
    first = next(iter(caches.values()))
    regions: dict[int, MemoryRegion] = {}
    planes = []
    try:
        for tensor in caches.values():
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in regions:
                regions[start] = engine.register(start, storage.nbytes(), owner=storage)
            block_bytes = tensor.stride(0) * tensor.element_size()
            planes.append([KvPlane(regions[start], tensor.data_ptr() - start, block_bytes)])
        on_host = all(region.gpu is None for region in regions.values())
        return KvCache(
            layout,
            first.shape[0],
            planes,
            permute=permute_on_host if on_host else None,
            owns=tuple(regions.values()),
        )
    except BaseException:
        for region in regions.values():
            region.close()
        raise
