"""Draining: the worker is told as often as it takes, and stopped only when it had its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.instances import Instance, InstanceState, Lease, Load
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.scaling.drain import drain
from tests.control_plane import worker
from verify.polling import eventually


@pytest.fixture
async def registry() -> AsyncIterator[EmbeddedRegistry]:
    registry = EmbeddedRegistry()
    yield registry
    await registry.close()


@pytest.fixture
async def lease(registry: EmbeddedRegistry) -> Lease:
    return await registry.register(worker("d", "decode"), state=InstanceState.READY)


async def draining(registry: EmbeddedRegistry) -> None:
    async def is_draining() -> bool:
        return (await registry.instance("d")).state is InstanceState.DRAINING

    await eventually(is_draining)


async def test_it_gives_the_worker_its_time(registry, lease):
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await draining(registry)
    told = await registry.heartbeat("d", lease.epoch, load=Load(running=1))
    assert told.drain_seconds == pytest.approx(60, abs=5)
    await asyncio.wait([task], timeout=0.5)
    assert not task.done(), "it works and has time left"
    task.cancel()


async def test_it_ends_with_its_time_and_grace(registry, lease, caplog):
    await asyncio.wait_for(drain(registry, "d", seconds=0.1, grace=0.1), 10)
    assert "worker d is stopped: it has not ended 0.1 s after its 0.1 s" in caplog.text


async def test_worker_that_the_registry_forgot_is_told_again(registry, lease):
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await draining(registry)
    await registry.deregister("d", lease.epoch)
    await asyncio.wait([task], timeout=0.5)
    assert not task.done(), "it may still be at work"
    again = await registry.register(worker("d", "decode"), state=InstanceState.READY)
    await draining(registry)
    assert (await registry.heartbeat("d", again.epoch)).drain_seconds is not None
    task.cancel()


async def test_registry_that_is_away_is_asked_again(registry, lease, monkeypatch):
    away = asyncio.Event()
    asked = asyncio.Event()
    drained = registry.drain

    async def refuse(instance_id: str, *, seconds: float) -> Instance:
        if away.is_set():
            asked.set()
            raise ControlPlaneUnavailable("Redis is away")
        return await drained(instance_id, seconds=seconds)

    away.set()
    monkeypatch.setattr(registry, "drain", refuse)
    task = asyncio.create_task(drain(registry, "d", seconds=60))
    await asyncio.wait_for(asked.wait(), 10)
    assert not task.done()
    away.clear()
    await draining(registry)
    task.cancel()
