"""The client of a Redis Cluster: it follows the fleet's keys to the node that has them.

All keys of a fleet are in one slot (`keyspace.py`), so no step needs a second node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from redis.asyncio import Redis
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.crc import key_slot
from redis.exceptions import ClusterDownError, MovedError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from kvxfer.addresses import host_and_port

Address: TypeAlias = tuple[str, int]

# The answers of a node that was replaced, or that is cut off from the others.
_GONE: Final = (MovedError, ClusterDownError)


def slot_client(
    nodes: Sequence[Address], prefix: str, *, finding: Mapping[str, Any], **options: Any
) -> Redis:
    """Returns a client of the node that has the slot of `prefix`. `finding` has the options of the
    clients that ask for that node."""
    secure = options.pop("ssl", False)
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        str(key_slot(prefix.encode())),
        _Nodes(nodes, finding),
        connection_class=_SecureConnection if secure else _Connection,
        **options,
    )
    return Redis.from_pool(pool)


class _Nodes:
    """A finder of a slot's node, in place of the Sentinels that find the master of a service."""

    def __init__(self, nodes: Sequence[Address], options: Mapping[str, Any]) -> None:
        self._named = tuple(nodes)
        self._known = deque(nodes)
        self._options = options

    async def discover_master(self, slot: str) -> Address:
        """Returns the node that has the slot. Each call asks another node first: one that is cut
        off from the others would name itself forever."""
        self._known.rotate(-1)
        said = []
        for host, port in tuple(self._known):
            try:
                async with Redis(host=host, port=port, **self._options) as node:
                    ranges: Any = await node.cluster("SLOTS")
            except (RedisError, OSError) as error:
                said.append(f"{host_and_port(host, port)}: {str(error).rstrip('.')}")
                continue
            found = [_address(has, host) for _, _, *all_of_one in ranges for has in all_of_one]
            there = {*self._named, *found}
            self._known = deque(dict.fromkeys([*filter(there.__contains__, self._known), *found]))
            for first, last, master, *_ in ranges:
                if first <= int(slot) <= last:
                    return _address(master, host)
            said.append(f"{host_and_port(host, port)}: no node has slot {slot}")
        # Sorted, so that the order of asking does not show: trouble is logged when it changes.
        raise RedisConnectionError("; ".join(sorted(said)))


def _address(node: Sequence[Any], asked: str) -> Address:
    """Returns a node's address, on the host `asked` if the node does not know its own name."""
    host, port = node[:2]
    return (cast("bytes", host).decode() if host else asked), int(port)


class _Connection(SentinelManagedConnection):
    """A connection that ends if its node does not have the keys; the next goes to the one that has
    them."""

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except _GONE as error:
            await self.disconnect()
            where = host_and_port(str(self.host), self.port)
            raise RedisConnectionError(f"{where} does not have the keys now: {error}") from error


class _SecureConnection(_Connection, SentinelManagedSSLConnection):
    pass
