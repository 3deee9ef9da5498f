"""All layers of a block as one write, if vLLM keeps them side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import torch

from kvxfer.connectors.vllm.caches import LayerCache
from kvxfer.connectors.vllm.settings import WHOLE_BLOCKS
from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvxfer.layout import KvLayout

_NOT_TOGETHER: Final = (
    f"{WHOLE_BLOCKS} is set, and the layers of a block do not lie side by side; set "
    f"VLLM_KV_CACHE_LAYOUT to BLHNC or BLNHC (not on CPUs), or {WHOLE_BLOCKS} to false"
)


def as_whole_blocks(caches: Mapping[str, LayerCache], layout: KvLayout) -> dict[str, LayerCache]:
    """Returns the caches of all layers, with this layout, as one, under the name of the last layer.

    Its blocks are moved as they are, so both sides must have the same layout: its packing includes
    a digest of it. Raises InvalidArgument if the layers of a block do not lie side by side.
    """
    if layout.layer_groups:
        raise InvalidArgument(
            f"{WHOLE_BLOCKS} is set, and the model has {layout.num_groups} KV cache groups, whose "
            f"blocks are not those of all layers; set {WHOLE_BLOCKS} to false"
        )
    in_memory = sorted(caches, key=lambda name: caches[name].tensor.data_ptr())
    tensors = [caches[name].tensor for name in in_memory]
    first = tensors[0]
    block_bytes = first.stride(0) * first.element_size()
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.stride(0) * tensor.element_size() != block_bytes:
            raise InvalidArgument(_NOT_TOGETHER)
        end += tensor[0].numel() * tensor.element_size()
    nbytes = end - first.data_ptr()
    if nbytes > block_bytes:
        raise InvalidArgument(_NOT_TOGETHER)
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    storage = empty.set_(first.untyped_storage())
    begin = first.data_ptr() - storage.data_ptr()
    size = layout.block_size
    whole = storage.as_strided(
        (len(first), 1, size, nbytes // size), (block_bytes, nbytes, nbytes // size, 1), begin
    )
    kept = asdict(layout) | {"tp_rank": 0}
    order = [list(caches).index(name) for name in in_memory]
    digest = hashlib.sha256(repr((sorted(kept.items()), order)).encode()).hexdigest()
    return {list(caches)[-1]: LayerCache(whole, packing=f"whole {digest[:16]}")}
