"""Fixtures of the reference engine's tests."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator

import pytest
import torch

from kvxfer.instances import Role
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights
from tests.kv.conftest import causes_are_waited_for

from .tiny import TINY
from .workers import WorkerPair, start_worker

__all__ = ["causes_are_waited_for"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def tiny_runner() -> ModelRunner:
    """The tiny model with seeded weights, byte tokens and 32 blocks of 4 tokens."""
    return ModelRunner(
        LlamaModel(TINY, seeded_weights(TINY, seed=1)), ByteTokenizer(), PagedKvCache(TINY, 32, 4)
    )


@pytest.fixture(params=["local", "tcp"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[WorkerPair]:
    """A connected pair on one fabric."""
    key = secrets.token_hex(32)
    async with contextlib.AsyncExitStack() as stack:
        prefill = await start_worker(stack, Role.PREFILL, key, request.param)
        decode = await start_worker(stack, Role.DECODE, key, request.param)
        yield WorkerPair(prefill, decode, key)
