from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument
from kvxfer.kv.blocks import ABSENT, by_group, pack_block_table, unpack_block_table

from .workers import GROUPED, LAYOUT


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50, unique=True))
def test_a_block_table_survives_the_wire(ids: list[int]) -> None:
    table = pack_block_table(np.array(ids, dtype=np.int32))
    assert len(table) == 4 * len(ids)
    assert unpack_block_table(table, 2**31, LAYOUT).tolist() == [ids]


def test_a_block_table_is_little_endian() -> None:
    assert pack_block_table(np.array([1, 258], dtype=np.int32)) == b"\1\0\0\0\2\1\0\0"
    big = np.array([1, 258], dtype=">i4")
    assert pack_block_table(big) == b"\1\0\0\0\2\1\0\0"


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (b"", "a block table of 0 bytes"),
        (b"\1\0\0", "a block table of 3 bytes"),
        (b"\x08\0\0\0", "block 8 of the block table is outside the pool; its blocks are 0 to 7"),
        (b"\0\0\0\0\xff\xff\xff\xff", "block -1 of the block table is outside the pool"),
        (b"\3\0\0\0\1\0\0\0\3\0\0\0", "block 3 is in the block table 2 times"),
    ],
)
def test_a_wrong_block_table_is_named(table: bytes, named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        unpack_block_table(table, 8, LAYOUT)
    assert named in str(caught.value)


def test_a_table_of_groups_survives_the_wire() -> None:
    rows = [[3, 1, 4], [ABSENT, ABSENT, 5]]
    table = pack_block_table(np.array(rows, dtype=np.int32))
    assert unpack_block_table(table, 8, GROUPED).tolist() == rows


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([1, 2, 3], "12 bytes; send 4 bytes for each of at least one block for each of 2 KV cache"),
        ([1, 2, 3, 1], "block 1 is in the block table 2 times"),
        ([1, 2, -2, 3], "block -2 of the block table is outside the pool"),
        ([1, 2, ABSENT, ABSENT], "without a block of one KV cache group"),
    ],
)
def test_a_wrong_table_of_groups_is_named(ids: list[int], named: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        unpack_block_table(pack_block_table(np.array(ids, dtype=np.int32)), 8, GROUPED)
    assert named in str(caught.value)


def test_blocks_of_other_groups_than_the_cache_has_are_refused() -> None:
    assert by_group(np.array([1, 2], dtype=np.int32), LAYOUT).tolist() == [[1, 2]]
    with pytest.raises(InvalidArgument, match="for 1 KV cache groups of a cache with 2"):
        by_group(np.array([1, 2], dtype=np.int32), GROUPED)
