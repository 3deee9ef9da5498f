from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from verify.processes.redis_server import RedisServer


@pytest.fixture
async def redis(empty_redis: RedisServer) -> AsyncIterator[Redis]:
    """A client of a Redis with nothing in it."""
    client = Redis(host="127.0.0.1", port=empty_redis.port)
    yield client
    with contextlib.suppress(RedisError):
        await client.aclose()
