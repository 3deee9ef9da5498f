"""The acts on the cluster, one after another. Each returns once the fleet is whole again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from kvxfer.instances import Role
from verify.polling import eventually

from .cluster import REPLICAS, Cluster
from .load import Load

# For so long Redis or a replica is down before it is started again.
_AWAY_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 30.0

Act: TypeAlias = Callable[[Cluster, Load, random.Random], Awaitable[str | None]]
"""Returns the HTTP address of a decode worker that it killed."""


async def kill_replica(cluster: Cluster, load: Load, rng: random.Random) -> None:
    number = rng.randrange(REPLICAS)
    cluster.kill(f"replica-{number}")
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.start_replica, number)
    await cluster.settled()


async def kill_prefill(cluster: Cluster, load: Load, rng: random.Random) -> None:
    cluster.kill(_one(cluster, Role.PREFILL, rng))
    await cluster.settled()


async def kill_decode(cluster: Cluster, load: Load, rng: random.Random) -> str:
    victim = _one(cluster, Role.DECODE, rng)
    address = cluster.running[victim].url
    # So that some stream is likely to be lost.
    await eventually(lambda: load.streaming, _DRAIN_SECONDS, pause=0.001)
    cluster.kill(victim)
    await cluster.settled()
    return address


async def lose_redis(cluster: Cluster, load: Load, rng: random.Random) -> None:
    fleet = await asyncio.to_thread(cluster.instances)
    before = {name: instance.epoch for name, instance in fleet.items()}
    cluster.redis.kill()
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.redis.start)
    # A replica that has not yet noticed the loss reports the fleet from before it.
    await cluster.settled(lambda fleet: all(fleet[name].epoch > before[name] for name in before))


async def drain(cluster: Cluster, load: Load, rng: random.Random) -> None:
    leaving = _one(cluster, Role.PREFILL, rng)
    await asyncio.to_thread(cluster.client.drain, leaving, deadline_seconds=_DRAIN_SECONDS)
    await asyncio.to_thread(cluster.left, leaving, 2 * _DRAIN_SECONDS)
    await cluster.settled()


async def add(cluster: Cluster, load: Load, rng: random.Random) -> None:
    for role in (Role.PREFILL, Role.DECODE):
        await asyncio.to_thread(cluster.add_worker, role)
    await cluster.settled()


async def change_role(cluster: Cluster, load: Load, rng: random.Random) -> None:
    moved = _one(cluster, Role.DECODE, rng)
    await asyncio.to_thread(cluster.client.change_role, moved, Role.PREFILL)
    await cluster.settled(lambda fleet: fleet[moved].role is Role.PREFILL)


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
