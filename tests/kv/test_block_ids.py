from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgument
from kvxfer.kv.block_ids import pack_block_table, unpack_block_table


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50, unique=True))
def test_a_block_table_survives_the_wire(ids: list[int]) -> None:
    table = pack_block_table(np.array(ids, dtype=np.int32))
    assert len(table) == 4 * len(ids)
    assert unpack_block_table(table, 2**31).tolist() == ids


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
        unpack_block_table(table, 8)
    assert named in str(caught.value)
