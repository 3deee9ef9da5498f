"""The K and V planes of a layer that kernels accept."""

from __future__ import annotations

from typing import Final

import torch

from kvxfer.errors import InvalidArgument

_TYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def require_planes(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises InvalidArgument unless both are planes [blocks, block_size, kv_heads, head_size] of
    one type and equal strides, each head contiguous."""
    if keys.dtype not in _TYPES or keys.dim() != 4 or keys.stride(3) != 1:
        raise InvalidArgument(
            f"the K plane is {list(keys.shape)} of {keys.dtype} by strides {keys.stride()}; pass "
            "[blocks, block_size, kv_heads, head_size] of float32, bfloat16 or float16, with "
            "contiguous heads"
        )
    if (keys.dtype, keys.shape, keys.stride()) != (values.dtype, values.shape, values.stride()):
        raise InvalidArgument(
            f"the V plane is {list(values.shape)} of {values.dtype} by strides {values.stride()}; "
            f"pass one like the K plane: {list(keys.shape)} of {keys.dtype} by {keys.stride()}"
        )
