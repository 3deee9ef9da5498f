"""Draining a worker before it is stopped: no new pairs, then wait for what it still has."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvxfer.errors import StaleEpoch, UnknownInstance
from kvxfer.instances import Instance, InstanceState
from kvxfer.scheduler.registry import Registry

_log = logging.getLogger("kvxfer.scaling")

_POLL_SECONDS: Final = 0.1
# A request is counted by its reservation first and by the worker's own load later. A second
# heartbeat without work is one that was sent after all reservations were gone.
_IDLE_HEARTBEATS: Final = 2


async def drain(registry: Registry, instance_id: str, *, seconds: float) -> None:
    """Returns when the worker has no work left, is gone, or `seconds` are over."""
    idle = 0
    heard: float | None = None
    try:
        async with asyncio.timeout(seconds):
            while idle < _IDLE_HEARTBEATS:
                instance = await _draining(registry, instance_id)
                if _busy(instance):
                    idle = 0
                elif heard is not None and instance.heartbeat_at > heard:
                    idle += 1
                heard = instance.heartbeat_at
                await asyncio.sleep(_POLL_SECONDS)
    except (UnknownInstance, StaleEpoch):
        return
    except TimeoutError:
        _log.warning("worker %s is stopped with work left after %g s", instance_id, seconds)


async def _draining(registry: Registry, instance_id: str) -> Instance:
    """The instance, told to drain where it is not draining yet or any more (a new lease)."""
    instance = await registry.instance(instance_id)
    if instance.state is not InstanceState.DRAINING:
        await registry.heartbeat(instance_id, instance.epoch, state=InstanceState.DRAINING)
        instance = await registry.instance(instance_id)
    return instance


def _busy(instance: Instance) -> bool:
    load = instance.load
    return load.running + load.waiting + instance.reserved.transfers > 0
