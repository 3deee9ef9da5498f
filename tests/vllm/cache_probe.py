"""Lets vLLM allocate a KV cache in host memory as its CPU worker does, within the connector's hook,
and checks that peers can map it: `python cache_probe.py`, in vLLM's environment."""

from __future__ import annotations

import asyncio
import logging

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvxfer.connectors.vllm.caches import LayerCache, layout_of, register_caches
from kvxfer.connectors.vllm.shared_cache import SharedCache
from kvxfer.engine import Engine

BLOCKS, TOKENS, LAYERS = 40, 32, 3


def allocate() -> dict[str, torch.Tensor]:
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    tensor = KVCacheTensor(LAYERS * BLOCKS * page, names, BLOCKS * page, page)
    config = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
    return allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)


async def registered(caches: dict[str, torch.Tensor]) -> bool:
    """True if the caches are in one region that peers can map."""
    kept = {name: LayerCache(tensor, 2) for name, tensor in caches.items()}
    layout = layout_of(kept, TOKENS)
    async with Engine(cluster_key=b"0123456789abcdef") as engine:
        with register_caches(engine, kept, layout) as cache:
            [region] = {plane.region for [plane] in cache.planes}
            for tensor, [plane] in zip(caches.values(), cache.planes, strict=True):
                block = tensor[BLOCKS - 1]
                assert block.data_ptr() == region.address + plane.offset + plane.block_stride * (
                    BLOCKS - 1
                )
            return region.handle.shareable


def main() -> None:
    with SharedCache(logging.getLogger()):
        caches = allocate()
    assert all(not tensor.any() for tensor in caches.values())
    assert asyncio.run(registered(caches)), "vLLM allocates its cache in another way"
    assert not asyncio.run(registered(allocate()))
    print("a cache of", LAYERS, "layers is shared")


if __name__ == "__main__":
    main()
