from __future__ import annotations

import pytest

from tests.examples.programs import run_example

pytestmark = pytest.mark.native


def test_each_version_is_served_byte_for_byte() -> None:
    nbytes = 4 * (1000 * 256 + 256 * 1024 + 1024 + 1024 * 256 + 256)
    *updates, refused, last = run_example("weight_update.py")
    assert [*updates, last] == [
        f"version 1, after a step: {nbytes} bytes, equal",
        f"version 2, after a step: {nbytes} bytes, equal",
        f"version 3, in other memory: {nbytes} bytes, equal",
        f"version 4, in float32 again: {nbytes} bytes, equal",
    ]
    assert refused.startswith(
        "version 4 is refused: 0.weight was float32 of [1000, 256], and is float16 of [1000, 256]"
    )
