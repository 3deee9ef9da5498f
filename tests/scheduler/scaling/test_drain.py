"""Draining: the worker is stopped only when it has no work left, or its time is over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from kvxfer.instances import Instance, InstanceState, Lease, Load
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.drain import drain
from tests.control_plane import worker

from .until import until

IDLE, BUSY = Load(), Load(running=1)


class WatchedRegistry(EmbeddedRegistry):
    """Counts how often somebody looked at an instance."""

    looks = 0

    async def instance(self, instance_id: str) -> Instance:
        self.looks += 1
        return await super().instance(instance_id)


@pytest.fixture
async def registry() -> AsyncIterator[WatchedRegistry]:
    registry = WatchedRegistry()
    yield registry
    await registry.close()


@pytest.fixture
async def lease(registry: WatchedRegistry) -> Lease:
    return await registry.register(worker("d", "decode"), state=InstanceState.READY)


async def draining(registry: WatchedRegistry) -> None:
    async def is_draining() -> bool:
        return (await registry.instance("d")).state is InstanceState.DRAINING

    await until(is_draining)


async def beat(registry: WatchedRegistry, lease: Lease, load: Load) -> None:
    """A heartbeat that the drain has seen, or that was its last."""
    await registry.heartbeat("d", lease.epoch, load=load)
    before = registry.looks
    with contextlib.suppress(TimeoutError):
        await until(lambda: registry.looks > before, seconds=2)
    await asyncio.sleep(0)


async def test_two_heartbeats_without_work_end_it(registry, lease):
    await registry.heartbeat("d", lease.epoch, load=BUSY)
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await draining(registry)
    await beat(registry, lease, BUSY)
    await beat(registry, lease, IDLE)
    await beat(registry, lease, BUSY)
    await beat(registry, lease, IDLE)
    assert not task.done(), "work came in between"
    await beat(registry, lease, IDLE)
    await asyncio.wait_for(task, 10)


async def test_it_ends_with_its_time(registry, lease, caplog):
    await registry.heartbeat("d", lease.epoch, load=BUSY)
    await asyncio.wait_for(drain(registry, "d", seconds=0.2), 10)
    assert "worker d is stopped with work left after 0.2 s" in caplog.text


async def test_worker_that_is_gone_has_drained(registry, lease):
    await asyncio.wait_for(drain(registry, "nobody", seconds=60), 10)
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await draining(registry)
    await registry.deregister("d", lease.epoch)
    await asyncio.wait_for(task, 10)


async def test_worker_that_registers_again_is_drained_again(registry, lease):
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await draining(registry)
    await registry.deregister("d", lease.epoch)
    again = await registry.register(worker("d", "decode"), state=InstanceState.READY)
    if not task.done():
        await draining(registry)
        for _ in range(2):
            await beat(registry, again, IDLE)
    await asyncio.wait_for(task, 10)
