"""Attention over a paged cache by a kernel, compared with torch."""

from __future__ import annotations

import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.kernels import paged_attention
from tests.kernels.paged_planes import attention, planes, sequence
from tests.kernels.tensors import DEVICE

TABLE = [5, 0, 11, 3, 8, 2, 10]  # the cache has 12 blocks
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(
    count: int,
    length: int,
    *,
    block_size: int = 16,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 32,
    dtype: torch.dtype = torch.float32,
    ids: torch.dtype = torch.int64,
    gap: int = 0,
) -> None:
    keys, values = planes(12, block_size, kv_heads, head_size, dtype, gap)
    generator = torch.Generator().manual_seed(length)
    queries = torch.randn(count, heads, head_size, generator=generator).to(DEVICE, dtype)
    table = torch.tensor(TABLE, dtype=ids, device=DEVICE)
    found = paged_attention(queries, keys, values, table, length)
    known = (sequence(plane, TABLE, length) for plane in (keys, values))
    torch.testing.assert_close(
        found, attention(queries, *known), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 112])
def test_one_token_sees_all_before_it(length: int) -> None:
    check(1, length)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 65])
def test_each_token_of_a_prompt_sees_those_up_to_it(length: int) -> None:
    check(length, length)


@pytest.mark.parametrize(("count", "length"), [(2, 17), (33, 40), (31, 112)])
def test_the_rest_of_a_prompt_sees_what_was_computed_before(count: int, length: int) -> None:
    check(count, length)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1), (20, 1)])
def test_query_heads_share_kv_heads(heads: int, kv_heads: int) -> None:
    check(5, 37, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize("head_size", [2, 16, 24, 80, 128])
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
def test_heads_and_blocks_of_any_size(head_size: int, block_size: int) -> None:
    check(3, min(7 * block_size, 33), head_size=head_size, block_size=block_size)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_types(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")
    check(1, 70, dtype=dtype)
    check(70, 70, dtype=dtype)


def test_tables_of_32_bits_and_blocks_that_lie_apart() -> None:
    check(4, 50, ids=torch.int32, gap=64)


def test_large_scores_do_not_overflow() -> None:
    keys, values = planes(12, 16, 2, 32, torch.float32)
    keys *= 300
    queries = torch.full((40, 4, 32), 100.0, device=DEVICE)
    table = torch.tensor(TABLE, device=DEVICE)
    found = paged_attention(queries, keys, values, table, 40)
    known = (sequence(plane, TABLE, 40) for plane in (keys, values))
    torch.testing.assert_close(found, attention(queries, *known), rtol=1e-5, atol=1e-5)


def test_arguments_that_do_not_fit_are_refused() -> None:
    keys, values = planes(2, 16, 2, 32, torch.float32)
    queries, table = torch.zeros(1, 4, 32, device=DEVICE), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match=r"1 queries at the end of 33 positions in 2 blocks"):
        paged_attention(queries, keys, values, table, 33)
    with pytest.raises(InvalidArgument, match=r"1 queries at the end of 0 positions"):
        paged_attention(queries, keys, values, table, 0)
    with pytest.raises(InvalidArgument, match=r"queries are \[1, 3, 32\] of torch.float32"):
        paged_attention(queries[:, :3], keys, values, table, 1)
    with pytest.raises(InvalidArgument, match=r"block table is \[2\] of torch.int16"):
        paged_attention(queries, keys, values, table.short(), 1)
    with pytest.raises(InvalidArgument, match=r"K plane is \[2, 16, 2, 32\] of torch.float64"):
        paged_attention(queries, keys.double(), values, table, 1)
    with pytest.raises(InvalidArgument, match=r"V plane is \[1, 16, 2, 32\]"):
        paged_attention(queries, keys, values[:1], table, 1)
