"""New tokens stored into a paged cache by a kernel, compared with torch."""

from __future__ import annotations

import pytest
import torch

from kvxfer.errors import InvalidArgument
from kvxfer.kernels import store_tokens
from tests.kernels.paged_planes import planes
from tests.kernels.tensors import DEVICE


@pytest.mark.parametrize("count", [0, 1, 5, 150])
@pytest.mark.parametrize("head_size", [16, 24, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_come_to_their_slots_and_nowhere_else(
    count: int, head_size: int, dtype: torch.dtype
) -> None:
    keys, values = planes(40, 4, 2, head_size, dtype, gap=8)
    generator = torch.Generator().manual_seed(count)
    slots = torch.randperm(160, generator=generator)[:count].to(DEVICE)
    # A projection returns K and V of a token side by side.
    both = torch.randn(count, 4, head_size, generator=generator).to(DEVICE, dtype)
    new_keys, new_values = both.chunk(2, dim=1)
    expected = []
    for plane, new in ((keys, new_keys), (values, new_values)):
        expected.append(plane.clone())
        expected[-1][slots // 4, slots % 4] = new
    store_tokens(keys, values, slots, new_keys, new_values)
    assert keys.equal(expected[0])
    assert values.equal(expected[1])


def test_other_shapes_are_refused() -> None:
    keys, values = planes(4, 4, 2, 16, torch.float32)
    new, slots = torch.zeros(3, 2, 16, device=DEVICE), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(InvalidArgument, match=r"slots are \[3\] of torch.int32"):
        store_tokens(keys, values, slots.int(), new, new)
    with pytest.raises(InvalidArgument, match=r"new_values is \[2, 2, 16\]"):
        store_tokens(keys, values, slots, new, new[:2])
    with pytest.raises(InvalidArgument, match=r"new_keys is \[3, 2, 16\] of torch.float64"):
        store_tokens(keys, values, slots, new.double(), new)
