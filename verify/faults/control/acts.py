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
        # So that some stream is likely to be lost.
        while not load.streaming:  # noqa: ASYNC110 (a glance is enough)
            await asyncio.sleep(0.001)
    cluster.kill_worker(victim)
    await cluster.whole()
    return cluster.addresses[victim]


async def lose_redis(cluster: Cluster, load: Load, rng: random.Random) -> None:
    before = {name: instance.epoch for name, instance in (await cluster.fleet()).items()}
    cluster.redis.kill()
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.redis.start)
    # A replica that has not yet heard of the loss tells of the fleet before it.
    await cluster.whole(lambda fleet: all(fleet[name].epoch > before[name] for name in before))


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
    await cluster.whole(lambda fleet: fleet[moved].role is Role.PREFILL)


ACTS: Final[dict[str, Act]] = {
    "kill -9 replica": kill_replica,
    "kill -9 prefill": kill_prefill,
    "kill -9 decode": kill_decode,
    "kill -9 Redis, data lost": lose_redis,
    "drain prefill": drain,
    "add prefill and decode": add,
    "role decode to prefill": change_role,
}


def _one(cluster: Cluster, role: Role, rng: random.Random) -> str:
    return rng.choice(sorted(name for name in cluster.workers if name.startswith(role)))
