"""The acts on the cluster while requests are under way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from verify.processes.fleet import CONTROL_PLANE

from .cluster import Cluster
from .load import Load
from .naming import Fault

Act: TypeAlias = Callable[[Cluster, Load, random.Random], Awaitable[Fault]]

# The time in which requests come to a dead process.
_DEAD_SECONDS: Final = 1.5
# After this time a resumed engine has noticed all that it missed.
_SETTLE_SECONDS: Final = 2.0


async def freeze(
    name: str, least: float, most: float, cluster: Cluster, load: Load, rng: random.Random
) -> Fault:
    """Sends SIGSTOP, and SIGCONT after `least` to `most` seconds."""
    fault = Fault(f"freeze {name}", time.monotonic(), waits=name == "decode")
    cluster.running[name].freeze()
    try:
        await asyncio.sleep(rng.uniform(least, most))
    finally:
        cluster.running[name].resume()
    fault.ended = time.monotonic()
    await asyncio.sleep(_SETTLE_SECONDS)
    return await _over(fault, cluster)


async def kill(name: str, cluster: Cluster, load: Load, rng: random.Random) -> Fault:
    """Kills an engine, and starts a new one with the same instance id."""
    fault = Fault(f"kill {name}", time.monotonic())
    await asyncio.to_thread(cluster.kill, name)
    # The start of a process would block the loop that measures times.
    await asyncio.to_thread(cluster.start_engine, name)
    return await _away(fault, cluster, load)


async def restart_control_plane(cluster: Cluster, load: Load, rng: random.Random) -> Fault:
    """Kills the control plane, and starts a new one with an empty registry at the same address."""
    fault = Fault("restart control plane", time.monotonic())
    await asyncio.to_thread(cluster.kill, CONTROL_PLANE)
    await asyncio.sleep(rng.uniform(0.1, 1.0))
    starting = asyncio.create_task(asyncio.to_thread(cluster.start_control_plane))
    try:
        return await _away(fault, cluster, load)
    finally:
        await starting


async def _away(fault: Fault, cluster: Cluster, load: Load) -> Fault:
    """Lets a few requests meet the dead process; holds the others until the cluster is whole."""
    await asyncio.sleep(_DEAD_SECONDS)
    load.flowing.clear()
    try:
        await _over(fault, cluster)
    finally:
        load.flowing.set()
    fault.ended = fault.over
    return fault


async def _over(fault: Fault, cluster: Cluster) -> Fault:
    await cluster.settled()
    fault.over = time.monotonic()
    return fault


NO_FAULT: Final = "none"

ACTS: Final[dict[str, Act | None]] = {
    NO_FAULT: None,
    # Shorter than the peer timeout.
    "freeze prefill 0.3 s": partial(freeze, "prefill", 0.3, 0.3),
    "freeze decode 0.3 s": partial(freeze, "decode", 0.3, 0.3),
    # Longer than the peer timeout, shorter than the lease at the control plane.
    "freeze prefill 1-3 s": partial(freeze, "prefill", 1.0, 3.0),
    "freeze decode 1-3 s": partial(freeze, "decode", 1.0, 3.0),
    "restart control plane": restart_control_plane,
    "kill -9 prefill": partial(kill, "prefill"),
    "kill -9 decode": partial(kill, "decode"),
    # Longer than the lease: the engine registers again.
    "freeze prefill 8 s": partial(freeze, "prefill", 8.0, 8.0),
    "freeze decode 8 s": partial(freeze, "decode", 8.0, 8.0),
}

# The acts that a retry heals while there is one pair.
HEALED: Final = ("freeze prefill 1-3 s", "freeze decode 1-3 s")
