"""Attention over a paged KV cache, read through a block table: for a prompt, or one more token.

The softmax is computed online, tile by tile, as in FlashAttention-2 (Dao, 2023, arXiv:2307.08691,
algorithm 1); keys and values are found by the table as in PagedAttention (Kwon et al., 2023,
arXiv:2309.06180).
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from kvxfer.errors import InvalidArgument
from kvxfer.kernels.planes import require_planes

# Limits of one program. tl.dot takes at least 16 in each dimension.
_LEAST: Final = 16
_MOST_ROWS: Final = 64
_TILE_BYTES: Final = 16384


# Compiled once, and not again if `count` or `first` is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["count", "first"])
def paged_attention_kernel(
    queries,  # [count, kv_heads * group, head_size]
    keys,  # [blocks, block_size, kv_heads, head_size], by strides; values likewise
    values,
    table,  # [blocks of the sequence], int32 or int64
    attended,  # same shape as queries
    count,
    first,  # position of the first query
    scale,  # the scores' scale times log2(e), for exp2
    block_size,
    block_stride,  # items from here on
    token_stride,
    head_stride,
    group: tl.constexpr,  # query heads that share a KV head
    head_size: tl.constexpr,
    width: tl.constexpr,  # head_size as a power of two
    rows: tl.constexpr,  # per program: one for each head of the group, of each query
    tokens: tl.constexpr,  # per tile
):
    kv_head = tl.program_id(1)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    query = row // group
    position = first + query
    dim = tl.arange(0, width)
    head = kv_head * group + row % group
    vector = query.to(tl.int64) * (tl.num_programs(1) * group) + head
    of_rows = (vector * head_size)[:, None] + dim[None, :]
    there = (query < count)[:, None] & (dim < head_size)[None, :]
    asked = tl.load(queries + of_rows, mask=there, other=0.0)

    highest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, width), tl.float32)
    last = first + tl.minimum((tl.program_id(0) * rows + rows - 1) // group, count - 1)
    of_head = kv_head.to(tl.int64) * head_stride
    for begin in range(0, last + 1, tokens):
        token = begin + tl.arange(0, tokens)
        seen = token <= last
        block = tl.load(table + token // block_size, mask=seen, other=0).to(tl.int64)
        vectors = block * block_stride + token % block_size * token_stride + of_head
        at = vectors[:, None] + dim[None, :]
        present = seen[:, None] & (dim < head_size)[None, :]
        key = tl.load(keys + at, mask=present, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # Every query sees position 0, so the highest is a number from the first tile on.
        weights = tl.exp2(scores - higher[:, None])
        kept = tl.exp2(highest - higher)
        total = total * kept + tl.sum(weights, axis=1)
        value = tl.load(values + at, mask=present, other=0.0)
        sums = sums * kept[:, None]
        sums += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        highest = higher
    found = (sums / total[:, None]).to(asked.dtype)
    tl.store(attended + of_rows, found, mask=there)


def paged_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: torch.Tensor,
    length: int,
) -> torch.Tensor:
    """Returns the attention of the last positions of a sequence, [count, heads, head_size].

    `queries` [count, heads, head_size] are those of the last `count` of `length` positions; each
    sees all positions up to its own, scores scaled by head_size**-0.5. `keys` and `values` are
    planes [blocks of the cache, block_size, kv_heads, head_size]; each KV head serves heads /
    kv_heads query heads. `blocks` is the sequence's block table, [blocks], int32 or int64. All are
    on one device; float32, bfloat16 or float16, summed in float32.

    Raises InvalidArgument for other shapes and types. A kernel cannot raise: the caller checks that
    the ids are blocks of the planes.
    """
    require_planes(keys, values)
    _, block_size, kv_heads, head_size = keys.shape
    count, heads = queries.shape[:2]
    if queries.dtype != keys.dtype or queries.shape[2] != head_size or heads % kv_heads:
        raise InvalidArgument(
            f"queries are {list(queries.shape)} of {queries.dtype}; for planes "
            f"{list(keys.shape)} of {keys.dtype} pass [tokens, multiple of {kv_heads}, "
            f"{head_size}] of that type"
        )
    if not 0 < count <= length or length > len(blocks) * block_size:
        raise InvalidArgument(
            f"{count} queries at the end of {length} positions in {len(blocks)} blocks of "
            f"{block_size}; pass a table of all positions"
        )
    if blocks.dtype not in (torch.int32, torch.int64) or blocks.dim() != 1:
        raise InvalidArgument(
            f"the block table is {list(blocks.shape)} of {blocks.dtype}; pass [blocks], int32 or "
            "int64"
        )
    group = heads // kv_heads
    width = max(_LEAST, triton.next_power_of_2(head_size))
    rows = _LEAST if count * group <= _LEAST else _MOST_ROWS
    queries = queries.contiguous()
    attended = torch.empty_like(queries)
    paged_attention_kernel[(triton.cdiv(count * group, rows), kv_heads)](
        queries,
        keys,
        values,
        blocks.contiguous(),
        attended,
        count,
        length - count,
        head_size**-0.5 * math.log2(math.e),
        block_size,
        *keys.stride()[:3],
        group=group,
        head_size=head_size,
        width=width,
        rows=rows,
        tokens=max(_LEAST, min(64, _TILE_BYTES // (width * keys.element_size()))),
    )
    return attended
