"""What is done to the cluster, one after another; each returns once the fleet is whole again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from kvxfer.instances import Role

from .cluster import REPLICAS, Cluster
from .load import Load

# Redis and a replica stay away for so long before they are started again.
_AWAY_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 30.0

Act: TypeAlias = Callable[[Cluster, Load, random.Random], Awaitable[str | None]]
"""Returns the HTTP address of a decode worker that it killed."""


async def kill_replica(cluster: Cluster, load: Load, rng: random.Random) -> None:
    port = cluster.kill_replica(rng.randrange(REPLICAS))
    await asyncio.sleep(_AWAY_SECONDS)
    await cluster.start_replica(port)
    await cluster.whole()


async def kill_prefill(cluster: Cluster, load: Load, rng: random.Random) -> None:
    cluster.kill_worker(_one(cluster, Role.PREFILL, rng))
    await cluster.whole()


async def kill_decode(cluster: Cluster, load: Load, rng: random.Random) -> str:
    victim = _one(cluster, Role.DECODE, rng)
    async with asyncio.timeout(_DRAIN_SECONDS):
        while not load.streaming:  # so that some stream is likely to be lost
            await asyncio.sleep(0.001)
    cluster.kill_worker(victim)
    await cluster.whole()
    return cluster.addresses[victim]


async def lose_redis(cluster: Cluster, load: Load, rng: random.Random) -> None:
    cluster.redis.kill()
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.redis.start)
    await cluster.whole()


async def drain(cluster: Cluster, load: Load, rng: random.Random) -> None:
    leaving = _one(cluster, Role.PREFILL, rng)
    await cluster.client.drain(leaving, deadline_seconds=_DRAIN_SECONDS)
    code = await cluster.left(leaving)
    if code:
        raise AssertionError(f"{leaving} was drained and exited with code {code}")
    await cluster.whole()


async def add(cluster: Cluster, load: Load, rng: random.Random) -> None:
    await cluster.add_worker(Role.PREFILL)
    await cluster.add_worker(Role.DECODE)
    await cluster.whole()


async def change_role(cluster: Cluster, load: Load, rng: random.Random) -> None:
    moved = _one(cluster, Role.DECODE, rng)
    await cluster.client.change_role(moved, Role.PREFILL)
    await cluster.whole({moved: Role.PREFILL})


ACTS: Final[dict[str, Act]] = {
    "kill -9 a replica": kill_replica,
    "kill -9 a prefill worker": kill_prefill,
    "kill -9 a decode worker": kill_decode,
    "kill -9 Redis, its data lost": lose_redis,
    "drain a prefill worker": drain,
    "add a prefill and a decode worker": add,
    "a decode worker becomes prefill": change_role,
}


def _one(cluster: Cluster, role: Role, rng: random.Random) -> str:
    return rng.choice(sorted(name for name in cluster.workers if name.startswith(role)))
