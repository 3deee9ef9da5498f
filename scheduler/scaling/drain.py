"""Draining a worker before it is stopped: it gets nothing new, finishes what it has, and leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvxfer.errors import ControlPlaneUnavailable, UnknownInstance
from kvxfer.scheduler.registry import Registry

_log = logging.getLogger("kvxfer.scaling")

_POLL_SECONDS: Final = 0.1
# A worker hears of its deadline with a heartbeat, and then has to stop.
_GRACE_SECONDS: Final = 15.0


async def drain(
    registry: Registry, instance_id: str, *, seconds: float, grace: float = _GRACE_SECONDS
) -> None:
    """Returns when the worker has left the registry, or `grace` after its `seconds` are over."""
    now = asyncio.get_running_loop().time
    deadline = now() + seconds
    try:
        async with asyncio.timeout_at(deadline + grace):
            while True:
                try:
                    # Also one that lost its lease before it heard of it, and registered again.
                    if (await registry.instance(instance_id)).drain_deadline is None:
                        await registry.drain(instance_id, seconds=max(0.0, deadline - now()))
                except UnknownInstance:
                    return
                except ControlPlaneUnavailable:
                    pass  # the worker goes on; it is told when the registry is back
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        _log.warning(
            "worker %s is stopped: it has not left %g s after its %g s to drain",
            instance_id,
            grace,
            seconds,
        )
