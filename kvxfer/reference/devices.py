"""The device that a model computes on, and a cache for it in torch's memory."""

from __future__ import annotations

import torch

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.kv_cache import PagedKvCache


def device_of(gpu: int | None) -> torch.device:
    """Returns the device of a model whose cache is on this GPU: the GPU. Returns the processor for
    None (a cache in host memory), and if torch has no CUDA.

    Raises InvalidArgument for a GPU that torch does not have.
    """
    if gpu is None or not torch.cuda.is_available():
        return torch.device("cpu")
    if gpu >= torch.cuda.device_count():
        raise InvalidArgument(
            f"torch has {torch.cuda.device_count()} GPUs and not number {gpu}; "
            "CUDA_VISIBLE_DEVICES says which it sees"
        )
    return torch.device("cuda", gpu)


def cache_on(
    device: torch.device,
    config: LlamaConfig,
    num_blocks: int,
    block_size: int,
    planes: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PagedKvCache:
    """Returns a paged cache for a model on this device, over these planes or new ones.

    Raises NotBuilt for a GPU without Triton.
    """
    if planes is None:
        shape = (num_blocks * block_size, config.num_kv_heads, config.head_size)
        planes = [
            (
                torch.zeros(shape, dtype=dtype, device=device),
                torch.zeros(shape, dtype=dtype, device=device),
            )
            for _ in range(config.num_layers)
        ]
    if device.type == "cpu":
        return PagedKvCache(config, num_blocks, block_size, planes)
    try:
        from kvxfer.reference.gpu_cache import GpuKvCache
    except ImportError as error:
        raise NotBuilt(
            f"attention over a cache on {device} needs Triton ({error}); install it: "
            "pip install 'kvxfer[gpu]'"
        ) from error
    return GpuKvCache(config, num_blocks, block_size, planes)
