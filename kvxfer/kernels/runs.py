"""Copies runs of bytes from the blocks of one pool to those of another: gather, scatter, other
block sizes, other heads per rank."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import triton
import triton.language as tl

from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvxfer.kv.plane_writes import Runs

# Words that one program copies: as many as its registers hold.
_TILE_WORDS: Final = 2048
_MOST_RUNS: Final = 64
_WORDS: Final = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}


@triton.jit
def copy_runs_kernel(
    source,  # pointers to bytes
    target,
    source_ids,  # [source_count], int32; negative: absent
    target_ids,  # [target_count]
    of_cycle,  # [rows, 4], int64: see Runs
    source_count,
    target_count,
    cycles,
    rows,
    first_block,
    source_blocks,  # per cycle
    target_blocks,
    source_stride,  # bytes from here on
    target_stride,
    source_begin,
    target_begin,
    units,  # per run
    word_bytes: tl.constexpr,  # bytes
    word_type: tl.constexpr,
    unit: tl.constexpr,  # words that every place and the length are multiples of
    runs_at_once: tl.constexpr,  # per program
    at_once: tl.constexpr,  # words of a run
):
    run = tl.program_id(0).to(tl.int64) * runs_at_once + tl.arange(0, runs_at_once)
    cycle = run // rows
    row = of_cycle + run % rows * 4
    there = cycle < cycles
    source_block = tl.load(row, mask=there, other=0) + cycle * source_blocks
    target_block = tl.load(row + 2, mask=there, other=0) + cycle * target_blocks - first_block
    there &= (source_block < source_count) & (target_block >= 0) & (target_block < target_count)
    source_id = tl.load(source_ids + source_block, mask=there, other=-1).to(tl.int64)
    target_id = tl.load(target_ids + target_block, mask=there, other=-1).to(tl.int64)
    there &= (source_id >= 0) & (target_id >= 0)
    source_at = source_begin + source_id * source_stride + tl.load(row + 1, mask=there, other=0)
    target_at = target_begin + target_id * target_stride + tl.load(row + 3, mask=there, other=0)

    word = tl.program_id(1) * at_once + tl.arange(0, at_once)
    mask = there[:, None] & (word < units * unit)[None, :]
    source_word = tl.multiple_of(source_at // word_bytes, unit)[:, None] + word[None, :]
    target_word = tl.multiple_of(target_at // word_bytes, unit)[:, None] + word[None, :]
    moved = tl.load(source.to(tl.pointer_type(word_type)) + source_word, mask=mask)
    tl.store(target.to(tl.pointer_type(word_type)) + target_word, moved, mask=mask)


@lru_cache(maxsize=4096)
def _of_cycle(runs: Runs, device: torch.device) -> torch.Tensor:
    """Copies the cycle to the device, once: a copy of pageable memory waits for the device."""
    return torch.from_numpy(runs.of_cycle).to(device)


def copy_runs(
    runs: Runs,
    source: torch.Tensor,
    source_ids: torch.Tensor,
    target: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    source_begin: int = 0,
    target_begin: int = 0,
    first_block: int = 0,
) -> None:
    """Copies all runs between two planes on one device, for the blocks of a prompt.

    `source` and `target` are contiguous uint8 tensors, in which the planes begin at `source_begin`
    and `target_begin` bytes. `source_ids` (int32, on the device) are the blocks of the prompt,
    `target_ids` those from its block `first_block` on; a run of a block that is beyond either table
    or whose id is negative is left out. Raises InvalidArgument for other types.

    A kernel cannot raise. The caller checks that the ids are inside of the planes, and that no
    block of the target is absent at the source, as `Runs.offsets` does.
    """
    for name, ids in (("source_ids", source_ids), ("target_ids", target_ids)):
        if ids.dtype != torch.int32 or ids.dim() != 1:
            raise InvalidArgument(
                f"{name} is {list(ids.shape)} of {ids.dtype}; pass [blocks], int32"
            )
    require_bytes("source", source)
    require_bytes("target", target)
    cycles = -(-len(source_ids) // runs.src_blocks)
    if cycles == 0:
        return
    of_cycle = _of_cycle(runs, source.device)
    aligned = _alignment(runs, source, target, source_begin, target_begin)
    word = min(aligned, 8)
    words = runs.length // word
    at_once = min(triton.next_power_of_2(words), _TILE_WORDS)
    together = min(max(1, _TILE_WORDS // at_once), _MOST_RUNS)
    total = cycles * len(of_cycle)
    copy_runs_kernel[(triton.cdiv(total, together), triton.cdiv(words, at_once))](
        source,
        target,
        source_ids,
        target_ids,
        of_cycle,
        len(source_ids),
        len(target_ids),
        cycles,
        len(of_cycle),
        first_block,
        runs.src_blocks,
        runs.dst_blocks,
        runs.src_stride,
        runs.dst_stride,
        source_begin,
        target_begin,
        runs.length // aligned,
        word_bytes=word,
        word_type=_WORDS[word],
        unit=aligned // word,
        runs_at_once=together,
        at_once=at_once,
    )


def require_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidArgument for a tensor that is not of contiguous bytes."""
    if tensor.dtype != torch.uint8 or not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} is a tensor of {tensor.dtype}, contiguous: {tensor.is_contiguous()}; pass "
            "contiguous uint8, as by view(torch.uint8)"
        )


def _alignment(runs: Runs, source: Any, target: Any, source_begin: int, target_begin: int) -> int:
    """Returns the most bytes, up to 16, that divide all addresses and the length."""
    return math.gcd(
        16,
        runs.length,
        runs.src_stride,
        runs.dst_stride,
        source.data_ptr() + source_begin,
        target.data_ptr() + target_begin,
        *map(int, np.gcd.reduce(runs.of_cycle[:, [1, 3]], axis=0)),
    )
