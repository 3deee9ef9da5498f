"""The registry that a URL names, and the election of a leader among the replicas that share it."""

from __future__ import annotations

from typing import Final

from kvxfer.errors import NotBuilt
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.keyspace import Keyspace
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.leader import Leader, OnlyReplica
from kvxfer.scheduler.scoring import Scorer

EMBEDDED: Final = "embedded"

# A control plane sweeps twice a second. Redis uses the same silence (lua/prelude.lua).
_SILENCE_SECONDS: Final = 1.0
_LEADER_SECONDS: Final = 30.0
# A leader campaigns once per round; one that is late keeps its term.
_ROUNDS_PER_TERM: Final = 3
_TIMEOUT: Final = 2.0
_KEYSPACE: Final = Keyspace()


def make_registry(
    url: str,
    policy: LeasePolicy,
    scorer: Scorer | None = None,
    keyspace: Keyspace = _KEYSPACE,
) -> Registry:
    """Returns the embedded registry for `embedded`, else the one in Redis.

    Raises InvalidArgument and NotBuilt.
    """
    if url == EMBEDDED:
        return EmbeddedRegistry(policy, scorer=scorer, silence_seconds=_SILENCE_SECONDS)
    try:
        from kvxfer.scheduler.redis_registry import RedisRegistry
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise NotBuilt(
            "a registry in Redis needs redis, which is not installed: pip install 'kvxfer[server]'"
        ) from error
    return RedisRegistry(url, policy, scorer=scorer, keyspace=keyspace)


def make_leader(url: str, *, interval: float, keyspace: Keyspace = _KEYSPACE) -> Leader:
    """Returns this replica's part in the election of an autoscaler.

    `url` is one that `make_registry` accepted. The autoscaler decides every `interval` seconds.
    """
    if url == EMBEDDED:
        return OnlyReplica()
    from kvxfer.scheduler.redis_registry.url import RedisUrl
    from kvxfer.scheduler.scaling.redis_leader import RedisLeader

    return RedisLeader(
        RedisUrl.parse(url).client(timeout=_TIMEOUT, prefix=keyspace.registry_prefix),
        seconds=max(_LEADER_SECONDS, _ROUNDS_PER_TERM * interval),
        prefix=keyspace.registry_prefix,
    )
