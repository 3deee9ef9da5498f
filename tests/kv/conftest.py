from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from .workers import Worker, worker


@pytest.fixture
def rng() -> random.Random:
    """Random choices of a test; a failure shows the seed, KVXFER_TEST_SEED repeats it."""
    seed = int(os.environ.get("KVXFER_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"KVXFER_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(params=["local", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture
async def pair(fabric: str) -> AsyncIterator[tuple[Worker, Worker]]:
    """A prefill and a decode worker; after the test every block of both is free."""
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        yield prefill, decode
