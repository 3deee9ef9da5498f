"""vLLM's KV cache tensors as a KvCache, or an error that names what cannot be mapped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import InvalidArgument
from kvxfer.kv.cache import KvCache, KvPlane, permute_on_host
from kvxfer.layout import ITEM_BYTES, HeadOrder, KvLayout, LayerShape

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from kvxfer.engine import Engine, MemoryRegion


SLEEP_BACKEND: Final = "kvxfer"
_PLAIN: Final = ("auto", "float16", "bfloat16")
_FP8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def packing_name(isa: str | None, cache_dtype: str) -> str:
    """Returns the name of the order of K and V within a head of a block, which depends on the
    attention kernel that vLLM has chosen (`layer.isa`). The AMX kernels have another for fp8."""
    if isa == "vec16":
        return "vec"
    return "amx-fp8" if isa == "amx" and cache_dtype in _FP8 else isa or ""


def form_name(cache_dtype: str) -> str:
    """Returns the name of what a GPU backend keeps for a head of a token, if that is more than K
    and V; else ""."""
    return "" if cache_dtype in _PLAIN or cache_dtype in _FP8 else cache_dtype


def heads_in_all(heads: int, totals: Iterable[int], tp_size: int) -> int | None:
    """Returns the KV heads before tensor parallelism of a layer with `heads` on each rank: the one
    of `totals` that gives this number, or None if not exactly one does."""
    if tp_size == 1:
        return heads
    possible = {total for total in totals if max(1, total // tp_size) == heads}
    return possible.pop() if len(possible) == 1 else None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache tensor of a layer in vLLM, and the properties that the tensor does not show."""

    tensor: torch.Tensor
    num_kv_heads: int | None = None
    """KV heads before tensor parallelism. None if unknown, as for the slots that an attention
    backend keeps instead of heads: blocks are then moved as they are, between equal ranks."""
    mla: bool = False
    packing: str = ""
    """The name of the order or form of the contents."""
    state: LayerShape | None = None
    """The state of a recurrent layer."""
    block_size: int | None = None
    """Tokens per block; None for the layout's."""


def require_movable(config: VllmConfig, platform: Any) -> None:
    """Raises InvalidArgument if the device's memory cannot be moved, or is released by sleep."""
    if not platform.is_cuda():
        raise InvalidArgument(
            f"vLLM runs on {platform.device_name}; kvxfer moves KV caches of CPUs and CUDA GPUs"
        )
    model = config.model_config
    if model.enable_sleep_mode and model.sleep_mode_backend != SLEEP_BACKEND:
        raise InvalidArgument(
            f"the sleep mode backend {model.sleep_mode_backend!r} releases the KV cache's memory "
            "while peers may write into it; start the server with "
            f"--sleep-mode-backend {SLEEP_BACKEND}"
        )


def in_model_order(caches: Mapping[str, LayerCache]) -> dict[str, LayerCache]:
    """Sorts the layers by the numbers in their names: vLLM lists them group by group.

    States come last: vLLM does not report when a recurrent layer is computed, but after the forward
    all are."""

    def place(name: str) -> tuple[bool, list[int], str]:
        numbers = [int(part) for part in name.split(".") if part.isdecimal()]
        return caches[name].state is not None, numbers, name

    return {name: caches[name] for name in sorted(caches, key=place)}


def layout_of(
    caches: Mapping[str, LayerCache],
    block_size: int,
    *,
    opaque: bool = True,
    cache_dtype: str = "auto",
    tp_size: int = 1,
    tp_rank: int = 0,
    groups: Sequence[Sequence[str]] = (),
) -> KvLayout:
    """Returns the layout of caches. `groups` has the names of the layers of each KV cache group.

    vLLM's tensors are `[num_blocks, heads, block_size, content]`, whatever the order in memory. The
    content is K and V of a head of a token, in the form that `packing` names if it has another form
    (scales). vLLM's CPU attention (`opaque`) has a separate order within a head of a block. MLA
    keeps one latent vector per token, a recurrent layer `[num_blocks, 1, 1, bytes]`. Layers may
    differ. Raises InvalidArgument for everything else.
    """
    if not caches:
        raise InvalidArgument("vLLM registered no KV caches; a model without them needs no kvxfer")
    name, first = next(iter(caches.items()))
    of_layers = []
    for other, cache in caches.items():
        if len(cache.tensor) != len(first.tensor):
            raise InvalidArgument(
                f"the KV cache of {other} has {len(cache.tensor)} blocks, that of {name} "
                f"{len(first.tensor)}; pools of several sizes cannot be moved"
            )
        of_layers.append(_shape_of(other, cache, block_size, opaque, cache_dtype, tp_size))
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    return KvLayout.from_layers(
        of_layers,
        block_size,
        tp_size=tp_size,
        tp_rank=tp_rank,
        layer_groups=tuple(group_of[name] for name in caches) if groups else (),
    )


def _shape_of(
    name: str, cache: LayerCache, block_size: int, opaque: bool, cache_dtype: str, tp_size: int
) -> LayerShape:
    tensor = cache.tensor
    if cache.state is not None:
        return _shape_of_state(name, tensor, cache.state, tp_size)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.element_size() == 1:  # a draft model or an indexer may have another dtype
        dtype = _FP8.get(cache_dtype, dtype)
    if dtype not in ITEM_BYTES:
        raise InvalidArgument(
            f"the KV cache of {name} is of {dtype}; use one of {', '.join(ITEM_BYTES)}"
        )
    heads, tokens = (1, tensor.shape[1]) if tensor.dim() == 3 else tuple(tensor.shape[1:3])
    width, wanted = tensor.shape[-1], cache.block_size or block_size
    if tensor.dim() not in (3, 4) or tokens != wanted or (cache.mla and heads != 1):
        raise InvalidArgument(
            f"the KV cache of {name} is {list(tensor.shape)} with blocks of {wanted} tokens; "
            "there should be [blocks, heads, tokens, bytes of K and V]. If the attention kernel "
            "divides blocks, set --block-size to a size that it takes whole"
        )
    order = _order_of(name, tensor, opaque)
    larger = 0 if tokens == block_size else tokens
    if cache.mla:
        return LayerShape(num_kv_heads=1, head_size=width, dtype=dtype, mla=True, block_size=larger)
    total = cache.num_kv_heads
    halved = width if opaque else heads * width if total is None else 0
    if tensor.dim() == 3 or halved % 2:
        raise InvalidArgument(
            f"the KV cache of {name} is {list(tensor.shape)}, without K and V for each head"
        )
    if total is None:
        return LayerShape(
            num_kv_heads=tp_size,
            head_size=heads * width // 2,
            dtype=dtype,
            order="HND",
            kv="opaque",
            packing=f"{cache.packing} {order}",
            block_size=larger,
        )
    if heads != (expected := max(1, total // tp_size)):
        raise InvalidArgument(
            f"the KV cache of {name} has {heads} heads, {expected} were expected of {total} over "
            f"{tp_size} ranks; this model splits its heads otherwise"
        )
    return LayerShape(
        num_kv_heads=total,
        head_size=width // 2 if opaque else width,
        dtype=dtype,
        order=order,
        kv="opaque" if opaque else "joined",
        packing=cache.packing,
        block_size=larger,
    )


def _shape_of_state(name: str, tensor: torch.Tensor, state: LayerShape, tp_size: int) -> LayerShape:
    nbytes = state.num_kv_heads // tp_size * state.head_size
    if tensor[0].numel() * tensor.element_size() != nbytes or not tensor[0].is_contiguous():
        raise InvalidArgument(
            f"the state of {name} is {list(tensor.shape)} of {tensor.dtype} with strides "
            f"{list(tensor.stride())}; there should be {nbytes} bytes that lie together"
        )
    return state


def _order_of(name: str, cache: torch.Tensor, opaque: bool) -> HeadOrder:
    """Returns the order of heads and tokens in a block. Raises InvalidArgument if the bytes of a
    block do not lie together."""
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


def register_caches(engine: Engine, caches: Mapping[str, LayerCache], layout: KvLayout) -> KvCache:
    """Registers each allocation of the tensors once: in vLLM all layers lie in one allocation, and
    layers of different groups may share memory. vLLM keeps the memory. CUDA's driver reports
    whether it is a GPU's memory, not `tensor.device`.

    On a GPU no heads are reordered after arrival: heads in different orders are written one by one.
    """
    tensors = [cache.tensor for cache in caches.values()]
    regions: dict[int, MemoryRegion] = {}
    planes = []
    try:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if start not in regions:
                regions[start] = engine.register(start, storage.nbytes(), owner=storage)
            block_bytes = tensor.stride(0) * tensor.element_size()
            planes.append([KvPlane(regions[start], tensor.data_ptr() - start, block_bytes)])
        on_host = all(region.gpu is None for region in regions.values())
        return KvCache(
            layout,
            len(tensors[0]),
            planes,
            permute=permute_on_host if on_host else None,
            owns=tuple(regions.values()),
        )
    except BaseException:
        for region in regions.values():
            region.close()
        raise
