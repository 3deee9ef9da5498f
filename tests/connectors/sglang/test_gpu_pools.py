"""SGLang's pools on the double of a CUDA driver, or on a GPU."""

from __future__ import annotations

import pytest

from tests.cuda.on_driver import run_on_driver

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kind", ["plain", "sliding", "mamba", "sparse", "mamba-sparse", "other-v"])
def test_pages_and_state_move_between_pools_of_a_gpu(kind: str) -> None:
    run_on_driver("tests.connectors.sglang.gpu_pools", kind)
