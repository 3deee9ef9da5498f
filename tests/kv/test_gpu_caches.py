"""KV caches in GPU memory, on the double of a CUDA driver or on a GPU."""

from __future__ import annotations

import pytest

from tests.cuda.on_driver import run_on_driver

pytestmark = pytest.mark.native


def test_blocks_move_between_caches_of_gpus_and_of_the_host(fabric: str) -> None:
    run_on_driver("tests.kv.gpu_caches", fabric)
