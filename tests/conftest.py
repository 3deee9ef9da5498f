from __future__ import annotations

import os
import random
from collections.abc import Iterator

import hypothesis
import pytest

from tests.redis_server import RedisServer

# No test is about how long one example takes.
hypothesis.settings.register_profile("kvxfer", deadline=None)
hypothesis.settings.load_profile("kvxfer")


@pytest.fixture
def rng() -> random.Random:
    """Random choices of a test; a failure shows the seed, KVXFER_TEST_SEED repeats it."""
    seed = int(os.environ.get("KVXFER_TEST_SEED") or random.SystemRandom().getrandbits(32))
    print(f"KVXFER_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture(params=["local", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """A server for tests that neither stop nor pause it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis: RedisServer) -> RedisServer:
    with shared_redis.client() as client:
        client.flushall()
    return shared_redis
