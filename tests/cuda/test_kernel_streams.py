"""Kernels of Triton in the order of the double's streams."""

from __future__ import annotations

import os

import pytest

from tests.cuda.on_driver import run_on_driver

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        "KVXFER_TEST_CUDA" in os.environ, reason="a GPU runs kernels itself; this tests the double"
    ),
]


@pytest.mark.parametrize("case", ["order", "unmapped"])
def test_kernels_run_in_the_order_of_a_stream(case: str) -> None:
    run_on_driver("tests.cuda.kernels_in_order", case)
