from __future__ import annotations

import logging

import pytest
import torch

import kvxfer.connectors.vllm.shared_cache as module
from kvxfer.connectors.vllm.shared_cache import SharedCache
from kvxfer.engine import Engine
from kvxfer.errors import OutOfMemory

pytestmark = pytest.mark.native

CPU = torch.device("cpu")
LOG = logging.getLogger("test")


def shareable(engine: Engine, tensor: torch.Tensor) -> bool:
    region = engine.register(tensor)
    try:
        return region.handle.shareable
    finally:
        region.close()


@pytest.fixture
def engine() -> Engine:
    return Engine(cluster_key=b"0123456789abcdef", fabrics=("local",))


def test_what_vllm_allocates_for_its_cache_is_shared(engine: Engine) -> None:
    with SharedCache(LOG):
        cache = torch.zeros(70_001, dtype=torch.int8, device=CPU)
    assert (cache.shape, cache.dtype, cache.device) == ((70_001,), torch.int8, CPU)
    assert not cache.any()
    view = cache[4096:8192].view(torch.bfloat16).view(2, 1024)
    del cache
    view[1] = 1.0  # the view keeps the memory alive
    assert shareable(engine, view)


def test_other_allocations_are_left_to_torch(engine: Engine) -> None:
    with SharedCache(LOG):
        others = [
            torch.zeros(4096, dtype=torch.int8),
            torch.zeros((2, 4096), dtype=torch.int8, device=CPU),
            torch.zeros(4096, dtype=torch.float32, device=CPU),
            torch.ones(4096, dtype=torch.int8, device=CPU),
        ]
        assert torch.zeros(0, dtype=torch.int8, device=CPU).numel() == 0
        assert torch.zeros(16, dtype=torch.int8, device=torch.device("meta")).is_meta
    others.append(torch.zeros(4096, dtype=torch.int8, device=CPU))  # after the hook has ended
    assert not any(shareable(engine, tensor) for tensor in others)


def test_without_shared_memory_torch_allocates_and_a_warning_is_logged(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> None:
        raise OutOfMemory(f"cannot allocate {nbytes} bytes of shareable memory")

    monkeypatch.setattr(module, "alloc_shared", refuse)
    with SharedCache(LOG):
        cache = torch.zeros(4096, dtype=torch.int8, device=CPU)
    assert not shareable(engine, cache)
    assert "the KV cache, and read it more slowly: cannot allocate 4096 bytes" in caplog.text
