"""The checksum of runs of memory, equal to the host's (`MemoryRegion.checksum`): the sum, modulo
2^64, of XXH3 (64 bits, https://xxhash.com) of each run, seeded with its number."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl

from kvxfer.errors import InvalidArgument
from kvxfer.kernels.runs import require_bytes

SHORTEST_RUN: Final = 248
"""Bytes; XXH3 hashes runs of at most 240 bytes in other ways."""

_RUNS: Final = 32

# XXH3's default secret and its first accumulators, as 64-bit words.
_SECRET: Final = (
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
)  # fmt: skip
_FIRST: Final = (
    0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1,
)  # fmt: skip


@triton.jit
def _key(constants, seed, word):
    """Returns words of the secret for a seed."""
    plain = tl.load(constants + word)[None, :]
    return tl.where((word % 2 == 0)[None, :], plain + seed, plain - seed)


@triton.jit
def _shifted_key(constants, seed, word, bits: tl.constexpr):
    """Returns words of the secret that begin `bits` bits after the given words."""
    low = _key(constants, seed, word) >> bits
    return low | (_key(constants, seed, word + 1) << (64 - bits))


@triton.jit
def _accumulate(sums, stripe, lane, key, there):
    """Adds a stripe of 8 words to the 8 sums; each word is also added to its neighbour's sum."""
    word = tl.load(stripe + lane[None, :], mask=there, other=0)
    neighbour = tl.load(stripe + (lane ^ 1)[None, :], mask=there, other=0)
    keyed = word ^ key
    return sums + neighbour + (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def checksum_kernel(
    memory,  # pointer to bytes
    places,  # [count], int64: the index of each run's first word
    numbers,  # [count], int64
    constants,  # the words of the secret, then those of the first sums
    sums_out,  # [programs], uint64
    count,
    words,  # per run
    runs_at_once: tl.constexpr,
):
    run = tl.program_id(0) * runs_at_once + tl.arange(0, runs_at_once)
    there = (run < count)[:, None]
    words_of = memory.to(tl.pointer_type(tl.uint64))
    begin = words_of + tl.load(places + run, mask=run < count, other=0)[:, None]
    seed = tl.load(numbers + run, mask=run < count, other=0).to(tl.uint64)[:, None]
    lane = tl.arange(0, 8)
    sums = tl.load(constants + 24 + lane)[None, :] + tl.zeros((runs_at_once, 8), tl.uint64)

    blocks = (words * 8 - 1) // 1024
    for block in range(blocks):
        for stripe in range(16):
            at = begin + block * 128 + stripe * 8
            sums = _accumulate(sums, at, lane, _key(constants, seed, stripe + lane), there)
        sums ^= sums >> 47
        sums ^= _key(constants, seed, 16 + lane)
        sums *= 0x9E3779B1
    stripes = (words * 8 - 1 - blocks * 1024) // 64
    for stripe in range(stripes):
        at = begin + blocks * 128 + stripe * 8
        sums = _accumulate(sums, at, lane, _key(constants, seed, stripe + lane), there)
    last = _shifted_key(constants, seed, 15 + lane, 8)
    sums = _accumulate(sums, begin + words - 8, lane, last, there)

    sums ^= _shifted_key(constants, seed, 1 + lane, 24)
    even, odd = tl.split(tl.reshape(sums, (runs_at_once, 4, 2)))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    hashed = tl.sum(folded, axis=1) + words.to(tl.uint64) * 8 * 0x9E3779B185EBCA87
    hashed ^= hashed >> 37
    hashed *= 0x165667919E3779F9
    hashed ^= hashed >> 32
    hashed = tl.where(run < count, hashed, tl.zeros((runs_at_once,), tl.uint64))
    tl.store(sums_out + tl.program_id(0), tl.sum(hashed, axis=0))


@lru_cache
def _constants(device: torch.device) -> torch.Tensor:
    words = [word - (1 << 64) if word >> 63 else word for word in (*_SECRET, *_FIRST)]
    return torch.tensor(words, dtype=torch.int64).to(device).view(torch.uint64)


def checksum_runs(
    memory: torch.Tensor, offsets: torch.Tensor, numbers: torch.Tensor, length: int
) -> torch.Tensor:
    """Returns the checksum of the runs of `length` bytes that begin at `offsets` of `memory`, each
    seeded with its number: a tensor [], int64, on the device of `memory`.

    `memory` is contiguous uint8; `offsets` and `numbers` are [runs], int64, on its device. Length
    and offsets are multiples of 8 bytes, the length at least 248. Raises InvalidArgument for other
    types and lengths. A kernel cannot raise: the caller checks the offsets.
    """
    require_bytes("memory", memory)
    if length < SHORTEST_RUN or length % 8 or memory.data_ptr() % 8:
        raise InvalidArgument(
            f"runs of {length} bytes in memory at {memory.data_ptr():#x}; a GPU hashes runs of at "
            f"least {SHORTEST_RUN} bytes, in multiples of 8: hash shorter ones on the host"
        )
    if offsets.shape != numbers.shape or offsets.dim() != 1:
        raise InvalidArgument(
            f"{list(offsets.shape)} runs with {list(numbers.shape)} numbers; pass one for each"
        )
    if offsets.dtype != torch.int64 or numbers.dtype != torch.int64:
        raise InvalidArgument(
            f"offsets of {offsets.dtype} and numbers of {numbers.dtype}; pass int64"
        )
    programs = triton.cdiv(len(offsets), _RUNS)
    sums = torch.zeros(programs, dtype=torch.int64, device=memory.device)
    if programs:
        checksum_kernel[(programs,)](
            memory,
            offsets // 8,
            numbers,
            _constants(memory.device),
            sums.view(torch.uint64),
            len(offsets),
            length // 8,
            runs_at_once=_RUNS,
        )
    return sums.sum()
