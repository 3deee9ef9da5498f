"""The acts on the cluster, one after another. Each returns once the fleet is whole again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from kvxfer.instances import Role
from verify.polling import eventually
from verify.processes.redis_failover import FailingOver

from .cluster import REPLICAS, Cluster
from .load import Load

# The time that Redis or a replica is down before it is started again.
_AWAY_SECONDS: Final = 1.0
_DRAIN_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True)
class Done:
    """The facts about an act that excuse failures and delays of its requests."""

    killed_decode: str | None = None
    """The HTTP address of the decode worker that the act killed."""
    outage_seconds: float = 0.0
    """The time without a registry."""


NOTHING: Final = Done()
Act: TypeAlias = Callable[[Cluster, Load, random.Random], Awaitable[Done]]


async def kill_replica(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    number = rng.randrange(REPLICAS)
    cluster.kill(f"replica-{number}")
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.start_replica, number)
    await cluster.settled()
    return NOTHING


async def kill_prefill(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    cluster.kill(_one(cluster, Role.PREFILL, rng))
    await cluster.settled()
    return NOTHING


async def kill_decode(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    victim = _one(cluster, Role.DECODE, rng)
    address = cluster.running[victim].url
    # Waits for a stream, so that one is likely to be lost.
    await eventually(lambda: load.streaming, _DRAIN_SECONDS, pause=0.001)
    cluster.kill(victim)
    await cluster.settled()
    return Done(killed_decode=address)


async def lose_redis(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    """Kills Redis. A single one loses all its data; if another takes over, the writes that it had
    not received are lost."""
    if isinstance(cluster.redis, FailingOver):
        return await _fail_over(cluster, cluster.redis)
    fleet = await asyncio.to_thread(cluster.instances)
    before = {name: instance.epoch for name, instance in fleet.items()}
    cluster.redis.kill()
    await asyncio.sleep(_AWAY_SECONDS)
    await asyncio.to_thread(cluster.redis.start)
    # A replica that has not yet noticed the loss reports the fleet from before it.
    await cluster.settled(lambda fleet: all(fleet[name].epoch > before[name] for name in before))
    return NOTHING


async def _fail_over(cluster: Cluster, redis: FailingOver) -> Done:
    began = time.monotonic()
    await asyncio.to_thread(redis.fail_over)
    outage, back = time.monotonic() - began, time.time()
    await cluster.settled(lambda fleet: all(one.heartbeat_at > back for one in fleet.values()))
    await asyncio.to_thread(redis.restore)
    return Done(outage_seconds=outage)


async def drain(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    leaving = _one(cluster, Role.PREFILL, rng)
    await asyncio.to_thread(cluster.client.drain, leaving, deadline_seconds=_DRAIN_SECONDS)
    await asyncio.to_thread(cluster.left, leaving, 2 * _DRAIN_SECONDS)
    await cluster.settled()
    return NOTHING


async def add(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    for role in (Role.PREFILL, Role.DECODE):
        await asyncio.to_thread(cluster.add_worker, role)
    await cluster.settled()
    return NOTHING


async def change_role(cluster: Cluster, load: Load, rng: random.Random) -> Done:
    moved = _one(cluster, Role.DECODE, rng)
    await asyncio.to_thread(cluster.client.change_role, moved, Role.PREFILL)
    await cluster.settled(lambda fleet: fleet[moved].role is Role.PREFILL)
    return NOTHING


ACTS: Final[dict[str, Act]] = {
    "kill -9 replica": kill_replica,
    "kill -9 prefill": kill_prefill,
    "kill -9 decode": kill_decode,
    "kill -9 Redis": lose_redis,
    "drain prefill": drain,
    "add prefill and decode": add,
    "role decode to prefill": change_role,
}


def _one(cluster: Cluster, role: Role, rng: random.Random) -> Done:
    return rng.choice(sorted(name for name in cluster.workers if name.startswith(role)))
