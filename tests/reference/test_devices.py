from __future__ import annotations

import sys

import pytest
import torch

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.reference.devices import cache_on, device_of
from kvxfer.reference.gpu_cache import GpuKvCache
from kvxfer.reference.kv_cache import PagedKvCache

from .tiny import TINY, shifted_planes

GPU = torch.device("cuda", 0)


def test_the_model_computes_where_its_cache_is_if_torch_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(0) == device_of(None) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device_of(0) == GPU
    assert device_of(None) == torch.device("cpu")
    with pytest.raises(InvalidArgument, match="torch has 1 GPUs and not number 1"):
        device_of(1)


def test_a_cache_on_a_gpu_is_read_by_kernels() -> None:
    planes = shifted_planes(TINY, 8, 4)
    assert type(cache_on(GPU, TINY, 8, 4, planes)) is GpuKvCache
    assert type(cache_on(torch.device("cpu"), TINY, 8, 4, planes)) is PagedKvCache


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvxfer.reference.gpu_cache", None)
    with pytest.raises(NotBuilt, match=r"on cuda:0 needs Triton .* pip install 'kvxfer\[gpu\]'"):
        cache_on(GPU, TINY, 8, 4, shifted_planes(TINY, 8, 4))
