"""Redis servers with fail-over, as real processes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Final, Self

from redis.crc import key_slot
from redis.exceptions import RedisError

from verify.polling import wait_until
from verify.processes.programs import free_port
from verify.processes.redis_server import RedisServer

# A fail-over takes the time after which a server counts as lost, and an election.
_FAIL_OVER_SECONDS: Final = 30.0
_SLOTS: Final = 1 << 14
_SHARDS: Final = 3  # enough for a majority without one of them
_NODE_MILLISECONDS: Final = 2000
_MANY: Final = 1000
_MOVE_MILLISECONDS: Final = 10_000


class FailingOver(ABC):
    """A master, and the standby that takes its place. A context manager."""

    master: RedisServer
    standby: RedisServer

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    @property
    @abstractmethod
    def url(self) -> str:
        """The registry's URL, without user and password."""

    @abstractmethod
    def _begin(self) -> None:
        """Starts the servers."""

    @abstractmethod
    def _whole(self) -> bool:
        """Returns whether a fail-over would succeed now."""

    def fail_over(self) -> None:
        """Kills the master; returns once the standby has taken its place."""
        self.master.kill()
        wait_until(self._stands_in, _FAIL_OVER_SECONDS)
        self.master, self.standby = self.standby, self.master

    def restore(self) -> None:
        """Starts the killed server again; returns once it is a standby with the data of the
        master."""
        self.standby.start()
        wait_until(self._whole, _FAIL_OVER_SECONDS)

    def _stands_in(self) -> bool:
        return _replication(self.standby).get("role") == "master"

    def _synchronised(self) -> bool:
        return bool(_replication(self.master).get("slave0", {}).get("state") == "online")

    def start(self) -> None:
        try:
            self._begin()
            wait_until(self._whole, _FAIL_OVER_SECONDS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Watched(FailingOver):
    """A master and its replica, watched by one Sentinel. `options` are for both."""

    def __init__(self, *options: str) -> None:
        super().__init__()
        self._options = options

    def _begin(self) -> None:
        started = self._stack.enter_context
        self.master = started(RedisServer(*self._options))
        follows = ("--replicaof", "127.0.0.1", str(self.master.port))
        self.standby = started(RedisServer(*self._options, *follows))
        self.sentinel = started(RedisServer(sentinel_of=self.master))

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/fleet/0"

    def _whole(self) -> bool:
        with self.sentinel.client() as watcher, contextlib.suppress(RedisError):
            return bool(watcher.sentinel_slaves("fleet")) and self._synchronised()
        return False


class Clustered(FailingOver):
    """A Redis Cluster of three shards; the one that has the slot of `prefix` has a replica."""

    def __init__(self, *options: str, prefix: str = "{kvxfer}") -> None:
        super().__init__()
        self._slot = key_slot(prefix.encode())
        self._buses: list[int] = []
        self._options = (
            *options,
            *("--cluster-enabled", "yes"),
            *("--cluster-node-timeout", str(_NODE_MILLISECONDS)),
        )

    def _begin(self) -> None:
        masters = [self._start() for _ in range(_SHARDS)]
        bounds = [_SLOTS * shard // _SHARDS for shard in range(_SHARDS + 1)]
        for master, first, end in zip(masters, bounds, bounds[1:], strict=False):
            _cluster(master, "ADDSLOTSRANGE", first, end - 1)
            _cluster(master, "SET-CONFIG-EPOCH", first + 1)
            if first <= self._slot < end:
                self.master = master
        self.standby = self._start()
        self.nodes = [*masters, self.standby]
        for node in self.nodes[1:]:
            _cluster(node, "MEET", "127.0.0.1", self.nodes[0].port, self._buses[0])
        name = _cluster(self.master, "MYID").decode()
        wait_until(lambda: name in _cluster(self.standby, "NODES").decode())
        _cluster(self.standby, "REPLICATE", name)

    def _start(self) -> RedisServer:
        # By default the bus has the port 10,000 above, which another program may have.
        self._buses.append(free_port())
        bus = ("--cluster-port", str(self._buses[-1]))
        return self._stack.enter_context(RedisServer(*self._options, *bus))

    @property
    def url(self) -> str:
        """The registry's URL, with two of the nodes: a client finds the others."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{one.port}" for one in self.nodes[:2])

    def _whole(self) -> bool:
        return self._synchronised() and all(
            b"cluster_state:ok" in _cluster(node, "INFO") for node in self.nodes
        )

    def move_slot(self) -> RedisServer:
        """Moves the keys of the fleet to a shard without a standby, as a resharding does. Returns
        the node that then has them."""
        source, slot = self.master, self._slot
        target = next(one for one in self.nodes if one not in (source, self.standby))
        name = _cluster(target, "MYID").decode()
        _cluster(target, "SETSLOT", slot, "IMPORTING", _cluster(source, "MYID").decode())
        _cluster(source, "SETSLOT", slot, "MIGRATING", name)
        with source.client() as client:
            while keys := client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, _MANY):
                client.migrate("127.0.0.1", target.port, keys, 0, _MOVE_MILLISECONDS)
        for node in (target, source):
            _cluster(node, "SETSLOT", slot, "NODE", name)
        return target


def _cluster(node: RedisServer, *words: str | int) -> bytes:
    """Sends a CLUSTER command. Returns the answer. Raises RedisError."""
    with node.client() as client:
        answer: Any = client.execute_command("CLUSTER", *words)
    if isinstance(answer, bytes):
        return answer
    return str(answer).encode()


def _replication(server: RedisServer) -> dict[str, Any]:
    with server.client() as client, contextlib.suppress(RedisError):
        return dict(client.info("replication"))
    return {}
