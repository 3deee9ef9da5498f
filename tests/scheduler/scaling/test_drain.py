"""Draining: the worker is told again if needed, and stopped only after its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import Instance, InstanceState, Lease, Load
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.scaling.drain import drain
from tests.virtual_time import VirtualClock, passes
from verify.processes.control_plane import worker


@pytest.fixture
async def registry(clock: VirtualClock) -> AsyncIterator[EmbeddedRegistry]:
    registry = EmbeddedRegistry(LeasePolicy(600), clock=clock)
    yield registry
    await registry.close()


@pytest.fixture
async def lease(registry: EmbeddedRegistry) -> Lease:
    return await registry.register(worker("d", "decode"), state=InstanceState.READY)


async def is_draining(registry: EmbeddedRegistry) -> bool:
    return (await registry.instance("d")).state is InstanceState.DRAINING


async def test_drain_gives_the_worker_its_time_and_the_grace(registry, lease, clock, caplog):
    task = asyncio.create_task(drain(registry, "d", seconds=60, grace=15, clock=clock))
    await passes(20)
    told = await registry.heartbeat("d", lease.epoch, load=Load(running=1))
    assert told.drain_seconds == pytest.approx(40)
    await passes(54.9)
    assert not task.done(), "it works and has time left"
    await passes(0.2)
    assert task.done()
    assert "worker d is stopped: it has not ended 15 s after its 60 s" in caplog.text


async def test_worker_that_the_registry_forgot_is_told_again(registry, lease, clock):
    task = asyncio.create_task(drain(registry, "d", seconds=60, clock=clock))
    await passes(10)
    assert await is_draining(registry)
    await registry.deregister("d", lease.epoch)
    await passes(30)
    assert not task.done(), "it may still be at work"
    again = await registry.register(worker("d", "decode"), state=InstanceState.READY)
    await passes(0.2)
    assert await is_draining(registry)
    told = await registry.heartbeat("d", again.epoch)
    assert told.drain_seconds == pytest.approx(60 - 40.2), "no more time than it had left"
    task.cancel()


async def test_unavailable_registry_is_asked_again(registry, lease, clock, monkeypatch):
    away, asked = True, 0
    drained = registry.drain

    async def refuse(instance_id: str, *, seconds: float) -> Instance:
        nonlocal asked
        if away:
            asked += 1
            raise ControlPlaneUnavailable("Redis is unavailable")
        return await drained(instance_id, seconds=seconds)

    monkeypatch.setattr(registry, "drain", refuse)
    task = asyncio.create_task(drain(registry, "d", seconds=60, clock=clock))
    await passes(10)
    assert asked > 1
    assert not task.done()
    assert not await is_draining(registry)
    away = False
    await passes(0.2)
    assert await is_draining(registry)
    task.cancel()
