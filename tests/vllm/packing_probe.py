"""Writes tokens with the kernels of vLLM's CPU attention, and checks that they lie where packing.py
says: `python packing_probe.py`, in vLLM's environment. Ends with an AssertionError otherwise."""

from __future__ import annotations

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from kvxfer.layout import Packing, packing_of

# The build for AVX-512 with bfloat16 packs for AMX on machines without it too.
CASES = [
    ("vec", "vec", 64, torch.float32),
    ("vec", "vec", 128, torch.bfloat16),
    ("vec", "vec", 32, torch.float16),
    ("vec", "vec16", 80, torch.bfloat16),
    ("amx", "amx", 128, torch.bfloat16),
]


def written(
    isa: str, head_size: int, dtype: torch.dtype, tokens: int, token: int, vector: int
) -> torch.Tensor:
    """Returns a head of a block of zeros, in which K (0) or V (1) of one token was written."""
    cache = torch.zeros(1, 1, tokens, 2 * head_size, dtype=dtype)
    key_cache, value_cache = cache.view(1, 1, 2 * tokens, head_size).chunk(2, dim=2)
    kv = [torch.zeros(1, 1, head_size, dtype=dtype) for _ in range(2)]
    kv[vector] += torch.arange(1, head_size + 1)
    slots = torch.tensor([token])
    ops.cpu_attn_reshape_and_cache(*kv, key_cache, value_cache, slots, isa)
    return cache.view(2, -1)


def check(name: str, isa: str, head_size: int, dtype: torch.dtype) -> None:
    packings = packing_of(name, head_size)
    assert packings is not None
    for vector, packing in enumerate(packings):
        units: dict[tuple[int, int], list[float]] = {}
        for tokens in (32, 64, 128):
            for token in range(tokens):
                head = written(isa, head_size, dtype, tokens, token, vector)
                assert not head[1 - vector].any()
                check_token(head[vector], packing, head_size, tokens, token, units)


def check_token(
    part: torch.Tensor,
    packing: Packing,
    head_size: int,
    tokens: int,
    token: int,
    units: dict[tuple[int, int], list[float]],
) -> None:
    """Checks that the token is in its unit of each row, the same in every block size, and nowhere
    else."""
    size = packing.tokens * head_size // packing.rows
    for row in range(packing.rows):
        begin = (row * (tokens // packing.tokens) + token // packing.tokens) * size
        unit = part[begin : begin + size].tolist()
        assert any(unit)
        assert units.setdefault((row, token % packing.tokens), unit) == unit
        part[begin : begin + size] = 0
    assert not part.any()


if __name__ == "__main__":
    current_platform.import_kernels()
    available = torch.cpu._is_avx512_bf16_supported()
    for case in CASES:
        if case[0] == "vec" or available:
            check(*case)
            print(*case)
