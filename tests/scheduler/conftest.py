from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvxfer.instances import InstanceState, Lease, Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry import RedisRegistry
from kvxfer.scheduler.registry import Registry
from tests.control_plane import pass_time
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE
from verify.processes.control_plane import worker

LEASE = 6.0
FEED_CAPACITY = 8


@dataclass
class RegistryUnderTest:
    """A registry under test, and the means to let time pass in it."""

    registry: Registry
    clock: VirtualClock

    async def pass_time(self, seconds: float) -> None:
        await pass_time(self.registry, self.clock, seconds)

    async def join(
        self,
        instance_id: str,
        role: Role | str = Role.PREFILL,
        *,
        state: InstanceState = InstanceState.READY,
        **changes: object,
    ) -> Lease:
        return await self.registry.register(worker(instance_id, role, **changes), state=state)


@pytest.fixture(params=["embedded", pytest.param("redis", marks=pytest.mark.native)])
async def fleet(
    request: pytest.FixtureRequest, clock: VirtualClock
) -> AsyncIterator[RegistryUnderTest]:
    """Each implementation of the registry in turn: lease of 6 s, the last 8 changes kept."""
    registry: Registry
    match request.param:
        case "embedded":
            registry = EmbeddedRegistry(
                LeasePolicy(LEASE), clock=clock, feed_capacity=FEED_CAPACITY
            )
        case "redis":
            server = request.getfixturevalue("empty_redis")
            registry = RedisRegistry(
                server.url,
                LeasePolicy(LEASE),
                clock=clock,
                feed_capacity=FEED_CAPACITY,
                timeout=PATIENCE,
            )
        case other:
            raise AssertionError(other)
    await registry.open()
    yield RegistryUnderTest(registry, clock)
    await registry.close()
