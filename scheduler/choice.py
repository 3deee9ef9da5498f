"""Which registry a URL asks for."""

from __future__ import annotations

from typing import Final

from kvxfer.errors import NotBuilt
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.registry import LeasePolicy, Registry

EMBEDDED: Final = "embedded"


def make_registry(url: str, policy: LeasePolicy) -> Registry:
    """The embedded registry for `embedded`, else the one in Redis. Raises InvalidArgument."""
    if url == EMBEDDED:
        return EmbeddedRegistry(policy)
    try:
        from kvxfer.scheduler.redis_registry import RedisRegistry
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise NotBuilt(
            "a registry in Redis needs redis, which is not installed: pip install 'kvxfer[server]'"
        ) from error
    return RedisRegistry(url, policy)
