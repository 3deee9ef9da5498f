"""Stores the keys and values of new tokens in the slots of a paged KV cache."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from kvxfer.errors import InvalidArgument
from kvxfer.kernels.planes import require_planes

_TILE_ITEMS: Final = 2048


@triton.jit(do_not_specialize=["count"])
def store_tokens_kernel(
    keys,  # planes [blocks, block_size, kv_heads, head_size], by strides
    values,
    slots,  # [count], int64
    new_keys,  # [count, kv_heads, head_size], tokens apart by strides
    new_values,
    count,
    block_size,
    block_stride,  # items from here on
    token_stride,
    head_stride,
    new_key_stride,
    new_value_stride,
    head_size: tl.constexpr,
    width: tl.constexpr,  # head_size as a power of two
    tokens: tl.constexpr,  # per program
):
    token = tl.program_id(0) * tokens + tl.arange(0, tokens)
    head = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, width)[None, :]
    there = token < count
    mask = there[:, None] & (dim < head_size)
    slot = tl.load(slots + token, mask=there, other=0)
    at = slot // block_size * block_stride + slot % block_size * token_stride
    at = (at + head * head_stride)[:, None] + dim
    from_keys = (token.to(tl.int64) * new_key_stride + head * head_size)[:, None] + dim
    from_values = (token.to(tl.int64) * new_value_stride + head * head_size)[:, None] + dim
    tl.store(keys + at, tl.load(new_keys + from_keys, mask=mask), mask=mask)
    tl.store(values + at, tl.load(new_values + from_values, mask=mask), mask=mask)


def store_tokens(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Stores `new_keys` and `new_values` [tokens, kv_heads, head_size] into planes [blocks,
    block_size, kv_heads, head_size], token `i` at `slots[i]`, which is its block times block_size
    plus its place there (int64).

    All on one device and of one type. Raises InvalidArgument for other shapes and types. A kernel
    cannot raise: the caller checks that the slots are in the planes, each of them once.
    """
    require_planes(keys, values)
    _, block_size, kv_heads, head_size = keys.shape
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise InvalidArgument(
            f"slots are {list(slots.shape)} of {slots.dtype}; pass [tokens], int64"
        )
    for name, new in (("new_keys", new_keys), ("new_values", new_values)):
        shape = (len(slots), kv_heads, head_size)
        if new.dtype != keys.dtype or new.shape != shape or new.stride()[1:] != (head_size, 1):
            raise InvalidArgument(
                f"{name} is {list(new.shape)} of {new.dtype} by strides {new.stride()}; pass "
                f"{list(shape)} of {keys.dtype}, with contiguous tokens"
            )
    width = triton.next_power_of_2(head_size)
    tokens = max(1, _TILE_ITEMS // width)
    if len(slots) == 0:
        return
    store_tokens_kernel[(triton.cdiv(len(slots), tokens), kv_heads)](
        keys,
        values,
        slots.contiguous(),
        new_keys,
        new_values,
        len(slots),
        block_size,
        *keys.stride()[:3],
        new_keys.stride(0),
        new_values.stride(0),
        head_size=head_size,
        width=width,
        tokens=tokens,
    )
