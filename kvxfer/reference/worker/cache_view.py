"""The memory of a worker's KvCache, as its model reads and writes it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvxfer.kv import KvCache
from kvxfer.layout import Part
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.devices import cache_on
from kvxfer.reference.kv_cache import PagedKvCache


def torch_view(cache: KvCache, config: LlamaConfig, device: torch.device) -> PagedKvCache:
    """Returns the memory of an allocated KvCache for a model on `device`. If the cache is on a GPU
    and the model computes on the processor, it is new memory of the same size."""
    layout = cache.layout
    planes = None
    if cache.gpu is None or device.type == "cuda":
        whole = from_dlpack(cache.memory)
        dtype = getattr(torch, layout.dtype)

        def plane(layer: int, part: Part) -> Tensor:
            begin = cache.plane(layer, part).offset
            return whole[begin : begin + cache.num_blocks * layout.part_bytes].view(dtype)

        planes = [(plane(layer, "K"), plane(layer, "V")) for layer in range(layout.num_layers)]
    return cache_on(device, config, cache.num_blocks, layout.block_size, planes)
