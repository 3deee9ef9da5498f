from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.moe.shape import MoeShape

SIZES: dict[str, Any] = {"experts": 8, "hidden": 256, "top_k": 2, "max_tokens": 16}


@pytest.mark.parametrize(
    ("given", "dtypes"),
    [
        ({}, ("bfloat16", "bfloat16", "bfloat16")),
        ({"input": "float32"}, ("float32", "float32", "float32")),
        ({"input": "float8_e4m3fn"}, ("float8_e4m3fn", "bfloat16", "bfloat16")),
        ({"wire": "float8_e4m3fn", "scale_block": 128}, ("float8_e4m3fn", "bfloat16", "bfloat16")),
        ({"input": "float32", "wire": "bfloat16"}, ("bfloat16", "float32", "float32")),
    ],
)
def test_dtypes_that_are_left_out_follow_the_input(
    given: dict[str, Any], dtypes: tuple[str, str, str]
) -> None:
    shape = MoeShape(**SIZES, **given)
    assert (shape.wire, shape.combine, shape.output) == dtypes
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(shape), type=MoeShape) == shape


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"experts": 0}, "experts is 0"),
        ({"hidden": 2.5}, "hidden is 2.5"),
        ({"top_k": 9}, "only 8 experts"),
        ({"slots": 0}, "slots is 0"),
        ({"input": "int8"}, "input is 'int8'"),
        ({"combine": "float8_e4m3fn"}, "too coarse"),
        ({"input": "float8_e4m3fn", "wire": "bfloat16"}, "so wire has to be"),
        ({"wire": "float8_e4m3fn"}, "needs a scale_block"),
        ({"wire": "float8_e4m3fn", "scale_block": 257}, r"from 1 to hidden \(256\)"),
        ({"wire": "float8_e4m3fn", "scale_block": -1}, "scale_block is -1"),
        ({"scale_block": 128}, "is for a wire of float8"),
    ],
)
def test_an_invalid_shape_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        MoeShape(**SIZES | given)


def test_the_last_block_of_a_row_may_be_short() -> None:
    shape = MoeShape(**SIZES | {"hidden": 2880}, wire="float8_e4m3fn", scale_block=128)
    assert shape.scales == 23
