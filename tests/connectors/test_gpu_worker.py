"""The worker side of the vLLM connector on the double of a CUDA driver, or on a GPU."""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.cuda.on_driver import run_on_driver

pytestmark = pytest.mark.native

ROUNDS: Final = os.environ.get("KVXFER_TEST_ROUNDS", "100")


@pytest.mark.parametrize("case", ["in_order", "blind", "stuck", "aborted", "collected"])
def test_blocks_follow_the_streams_of_both_sides(case: str) -> None:
    run_on_driver("tests.connectors.gpu_worker", case, ROUNDS)
