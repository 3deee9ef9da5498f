"""The reference engine with caches in GPU memory, on the double of a driver or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

from tests.cuda.on_driver import run_on_driver

ON_GPU = "KVXFER_TEST_CUDA" in os.environ

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        ON_GPU and not torch.cuda.is_available(), reason="torch is built without CUDA here"
    ),
]


def test_decode_gives_the_tokens_of_a_single_process(fabric: str) -> None:
    run_on_driver("tests.reference.gpu_pair", fabric, "ordered")


@pytest.mark.skipif(ON_GPU, reason="how late a GPU is depends on the GPU; the double is slow")
def test_layers_sent_without_regard_to_the_stream_change_tokens() -> None:
    run_on_driver("tests.reference.gpu_pair", "local", "unordered")
