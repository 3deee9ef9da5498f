"""Moves KV caches of every attention backend of vLLM in GPU memory: `python -m
tests.vllm.gpu_layouts`, in vLLM's environment, on a CUDA driver or the double of one.

Backends, specs and views are vLLM's own; no backend computes. Each form of cache is moved between
instances with equal and with different numbers of ranks. The same tokens have to be in the views
of the other side.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import sys
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from math import prod
from types import ModuleType
from typing import Any, Final

import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.connectors.vllm.caches import LayerCache, form_name, layout_of, register_caches
from kvxfer.engine import Engine
from kvxfer.errors import InvalidArgument, LayoutMismatch
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity
from kvxfer.kv.plan import plan_transfer
from kvxfer.ticket import Ticket, sign_ticket
from tests.cuda import device_memory
from tests.cuda.bindings import context
from verify.polling import PATIENCE

KEY: Final = b"0123456789abcdef0123456789abcdef"
LAYERS, HEADS, BLOCKS, TOKENS = 2, 4, 6, 150
RANKS: Final = ((1, 1), (2, 1), (1, 2))
BLOCK_SIZES: Final = (16, 128)
# In these layouts the bytes of a block are not contiguous.
SCATTERED: Final = (KVCacheLayout.BHLNC, KVCacheLayout.LHBNC)
# Each has the form of another dtype that is tried.
ALIASES: Final = ("float16", "bfloat16", "fp8_e4m3")
DS_MLA: Final = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}  # as MLAAttention.get_kv_cache_spec()


@dataclass(frozen=True)
class Kept:
    """A form of cache: the spec of a rank that has all heads, and a layout."""

    spec: AttentionSpec
    cache_dtype: str
    layout: KVCacheLayout
    of_heads: Callable[[int], AttentionSpec] = field(compare=False)
    """Returns the spec of a rank with the given number of heads."""

    @property
    def mla(self) -> bool:
        return isinstance(self.spec, MLAAttentionSpec)

    @property
    def slots(self) -> bool:
        return self.spec.num_head_slots is not None

    @property
    def scattered(self) -> bool:
        return self.layout in SCATTERED and self.spec.num_heads > 1

    def __str__(self) -> str:
        spec = self.spec
        kind = "MLA" if self.mla else f"{spec.num_heads} slots" if self.slots else "heads"
        return (
            f"{self.layout.name} {kind} of {spec.state_content_size_bytes} bytes, "
            f"{spec.block_size} tokens, {self.cache_dtype}"
        )


def backends() -> Iterator[tuple[str, Any]]:
    """Yields name and class of each backend that imports here; prints the names of the others."""
    # vLLM has a library of kernels for each kind of processor. ROCm's backends import another one,
    # and the process ends if two are loaded.
    current_platform.import_kernels()
    sys.modules["vllm._C"] = ModuleType("vllm._C")
    for member in AttentionBackendEnum:
        if member.name in ("TORCH_SDPA", "NO_ATTENTION", "CUSTOM"):
            continue  # they keep nothing
        try:
            yield member.name, member.get_class()
        except Exception as error:  # whatever its package raises
            print(f"{member.name}: not tried, as it does not import here: {error!r:.100}")


def kept_by(backend: Any) -> Iterator[Kept]:
    """Yields every form of cache that a backend supports, with one head size."""
    sizes = backend.get_supported_head_sizes() or [64]
    head_size = 64 if 64 in sizes else sizes[0]
    dtypes = [dtype for dtype in backend.supported_kv_cache_dtypes if dtype not in ALIASES]
    layouts = backend.supported_kv_cache_layouts() or tuple(KVCacheLayout)
    for block_size, cache_dtype in product(BLOCK_SIZES, dtypes):
        if not backend.supports_block_size(block_size):
            continue
        shape = {
            "block_size": block_size,
            "head_size": head_size,
            "dtype": STR_DTYPE_TO_TORCH_DTYPE.get(cache_dtype, torch.bfloat16),
            "kv_quant_mode": get_kv_quant_mode(cache_dtype),
        }

        def of_heads(heads: int, shape: dict[str, Any] = shape, dtype: str = cache_dtype) -> Any:
            if not backend.is_mla():
                return backend.customize_spec(FullAttentionSpec(**shape, num_kv_heads=heads))
            packed = {"state_content_bytes": DS_MLA.get(dtype), "cache_dtype_str": dtype}
            return backend.customize_spec(MLAAttentionSpec(**shape, **packed, num_kv_heads=1))

        for layout in layouts:
            yield Kept(of_heads(HEADS), cache_dtype, layout, of_heads)


class Rank:
    """A rank's caches: vLLM's views of GPU memory, and of a mirror of it in host memory."""

    def __init__(self, kept: Kept, ranks: int, rank: int) -> None:
        spec = kept.of_heads(HEADS // ranks)
        # The blocks of one prompt, and BLOCKS more.
        self.blocks = -(-TOKENS // spec.block_size) + BLOCKS
        shape = (LAYERS, *compute_layer_kv_cache_shape_bytes(spec, self.blocks))
        layer, block, *_ = compute_layout_strides(spec, self.blocks, LAYERS, kept.layout)
        self.nbytes = max(prod(shape), LAYERS * layer, self.blocks * block)
        names = [f"layers.{index}" for index in range(LAYERS)]
        placed = KVCacheTensor(self.nbytes, names, layer, block)

        def views(raw: torch.Tensor) -> dict[str, torch.Tensor]:
            made = create_kv_cache_views(raw, spec, self.blocks, kept.layout, placed)
            return dict(zip(names, made, strict=True))

        self.address = device_memory.allocate(self.nbytes)
        on_gpu = (ctypes.c_int8 * self.nbytes).from_address(self.address)
        on_gpu_views = views(torch.frombuffer(on_gpu, dtype=torch.int8))
        self.mirror = torch.zeros(self.nbytes, dtype=torch.int8)
        self.mirrored = [view.view(torch.int8) for view in views(self.mirror).values()]
        packing = "SLOTS" if kept.slots else form_name(kept.cache_dtype)
        heads = None if kept.slots else HEADS
        self.caches = {
            name: LayerCache(view, heads, mla=kept.mla, packing=packing)
            for name, view in on_gpu_views.items()
        }
        self.layout = layout_of(
            self.caches,
            spec.block_size,
            opaque=False,
            cache_dtype=kept.cache_dtype,
            tp_size=ranks,
            tp_rank=rank,
        )
        first, count = self.layout.first_head, self.layout.heads_per_rank
        whole = kept.mla or kept.slots
        self.heads = slice(spec.num_heads) if whole else slice(first, first + count)
        self.ids = random.Random(rank).sample(range(self.blocks), self.layout.blocks_for(TOKENS))

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        device_memory.free(self.address)

    def put(self, tokens: torch.Tensor) -> None:
        """Writes the prompt, [layers, tokens, heads, bytes], into its blocks."""
        for cache, of_layer in zip(self.mirrored, tokens, strict=True):
            for token, content in enumerate(of_layer[:, self.heads]):
                block, at = divmod(token, self.layout.block_size)
                cache[self.ids[block], :, at] = content
        device_memory.write(self.address, self.mirror.numpy().tobytes())

    def get(self) -> torch.Tensor:
        """Returns the prompt as its blocks have it, with the rank's heads."""
        raw = bytearray(device_memory.read(self.address, self.nbytes))
        self.mirror[:] = torch.frombuffer(raw, dtype=torch.int8)
        size = self.layout.block_size
        return torch.stack(
            [
                torch.stack(
                    [cache[self.ids[token // size], :, token % size] for token in range(TOKENS)]
                )
                for cache in self.mirrored
            ]
        )


@asynccontextmanager
async def endpoint_of(rank: Rank, name: str) -> AsyncIterator[tuple[Engine, KvEndpoint]]:
    options = {"fabrics": ("local",), "peer_timeout": PATIENCE}
    async with Engine(cluster_key=KEY, name=name, **options) as engine:
        with register_caches(engine, rank.caches, rank.layout) as cache:
            assert cache.gpu == 0
            identity = KvIdentity(name, KEY, 1)
            async with KvEndpoint(engine, cache, None, identity) as endpoint:
                yield engine, endpoint


async def move(prefill: Kept, decode: Kept, ranks: tuple[int, int]) -> None:
    """Moves a prompt between the ranks of two instances and compares every byte."""
    content = prefill.spec.state_content_size_bytes
    heads = prefill.spec.num_heads
    tokens = torch.randint(-128, 128, (LAYERS, TOKENS, heads, content), dtype=torch.int8)
    async with AsyncExitStack() as stack:

        async def instance(kept: Kept, count: int, name: str) -> list[Any]:
            made = [stack.enter_context(Rank(kept, count, index)) for index in range(count)]
            return [
                (rank, *await stack.enter_async_context(endpoint_of(rank, name))) for rank in made
            ]

        ours = await instance(prefill, ranks[0], "p")
        theirs = await instance(decode, ranks[1], "d")
        for rank, *_ in ours:
            rank.put(tokens)
        expires = SYSTEM_CLOCK.unix() + 20 * PATIENCE
        ticket = sign_ticket(Ticket(uuid.uuid4().hex, "r", "p", 1, "d", 1, expires), KEY)
        addresses = [engine.address for _, engine, _ in ours]
        receiving = [
            await endpoint.decode_session(ticket, addresses, EngineBlocks(rank.ids))
            for rank, _, endpoint in theirs
        ]
        for rank, _, endpoint in ours:
            session = await endpoint.prefill_session(ticket, EngineBlocks(rank.ids))
            for layer in range(LAYERS):
                session.write_layer(layer)
            await session.finish(b"")
        for session, (rank, *_) in zip(receiving, theirs, strict=True):
            await session.wait()
            session.take().release()
            assert torch.equal(rank.get(), tokens[:, :, rank.heads]), (prefill, decode, ranks)


def fits_other_ranks(kept: Kept) -> bool:
    with Rank(kept, 2, 0) as one_of_two, Rank(kept, 1, 0) as alone:
        try:
            plan_transfer(one_of_two.layout, alone.layout)
        except LayoutMismatch:
            return False
        return True


def refused(kept: Kept) -> bool:
    """True if the cache, whose blocks are scattered, is refused with the remedy in the error."""
    try:
        with Rank(kept, 1, 0):
            return False
    except InvalidArgument as error:
        assert "set VLLM_KV_CACHE_LAYOUT to LBHNC" in str(error), error
        return True


async def main() -> None:
    keepers: dict[Kept, list[str]] = defaultdict(list)
    for name, backend in backends():
        for kept in kept_by(backend):
            keepers[kept].append(name)
    tried = {name for names in keepers.values() for name in names}
    assert tried >= {"FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA", "FLASHMLA", "B12X"}, tried
    by_content: dict[Any, list[Kept]] = defaultdict(list)
    moved = 0
    for kept, names in sorted(keepers.items(), key=lambda item: str(item[0])):
        if kept.scattered:
            assert refused(kept), kept
            print(f"{kept}: refused by name [{', '.join(names)}]")
            continue
        if kept.slots:  # blocks move unchanged, between equal ranks only
            await move(kept, kept, (1, 1))
            moved += 1
            assert not fits_other_ranks(kept), kept
            print(f"{kept}: moved between equal ranks [{', '.join(names)}]")
            continue
        for ranks in RANKS:
            await move(kept, kept, ranks)
            moved += 1
        print(f"{kept}: moved [{', '.join(names)}]")
        same = (kept.mla, kept.spec.state_content_size_bytes, kept.cache_dtype)
        by_content[same].append(kept)
    # Layouts and block sizes differ between the two sides.
    for alike in by_content.values():
        for prefill, decode in zip(alike, alike[1:] + alike[:1], strict=True):
            if prefill != decode:
                await move(prefill, decode, (1, 1))
                moved += 1
    print(f"{len(keepers)} forms of a cache, {moved} prompts moved")


if __name__ == "__main__":
    context()
    asyncio.run(main())
