"""Draining a worker before it is stopped: it gets nothing new, finishes what it has, and leaves."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable, UnknownInstance
from kvxfer.scheduler.registry import Registry

_log = logging.getLogger("kvxfer.scaling")

_POLL_SECONDS: Final = 0.1
# A worker hears of its deadline with a heartbeat, and then has to stop.
_GRACE_SECONDS: Final = 15.0


async def drain(
    registry: Registry,
    instance_id: str,
    *,
    seconds: float,
    grace: float = _GRACE_SECONDS,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Drains a worker for at most `seconds`, and returns `grace` seconds after that.

    The caller notices a worker that ends earlier. A registry that does not know the worker is no
    proof of its end: it may have lost its memory.
    """
    deadline = clock.monotonic() + seconds
    try:
        async with asyncio.timeout(seconds + grace):
            while True:
                try:
                    # The worker may have lost its lease before it heard of it, and come back.
                    if (await registry.instance(instance_id)).drain_deadline is None:
                        left = max(0.0, deadline - clock.monotonic())
                        await registry.drain(instance_id, seconds=left)
                except (UnknownInstance, ControlPlaneUnavailable):
                    pass  # retried until the worker has registered again or the registry is back
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        _log.warning(
            "worker %s is stopped: it has not ended %g s after its %g s to drain",
            instance_id,
            grace,
            seconds,
        )
