"""One replica's registry in Redis, for a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvxfer.scheduler.ending import end
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE, eventually
from verify.processes.redis_server import RedisServer


@asynccontextmanager
async def replica(
    server: RedisServer | str,
    *,
    lease: float = 60.0,
    clock: VirtualClock | None = None,
    timeout: float = PATIENCE,
    there: bool = True,
    prefix: str = "kvxfer",
) -> AsyncIterator[RedisRegistry]:
    """Opens a registry. A test without Redis gives a short timeout; others need a long one."""
    url = server if isinstance(server, str) else server.url
    keyspace = Keyspace(prefix)
    registry = RedisRegistry(
        url, LeasePolicy(lease), clock=clock, timeout=timeout, keyspace=keyspace
    )
    opening = asyncio.create_task(registry.open())
    try:
        if there:
            await opening
            await eventually(lambda: is_current(registry))
        yield registry
    finally:
        await end(opening)
        await registry.close()


async def is_current(registry: RedisRegistry) -> bool:
    await registry.instances()
    return registry.stale_seconds is None
