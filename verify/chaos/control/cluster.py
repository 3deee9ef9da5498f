"""The cluster: Redis, replicas of the control plane, workers, the router.

With a single Redis, the replicas of the control plane are behind one address; else their clients
have all addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from kvxfer.instances import Instance, Role
from verify.polling import eventually
from verify.processes.balancer import Balancer
from verify.processes.fleet import Fleet
from verify.processes.programs import Server, free_port
from verify.processes.redis_failover import Clustered, FailingOver, Watched
from verify.processes.redis_server import RedisServer, audit

REPLICAS: Final = 3
WORKERS: Final = {Role.PREFILL: 3, Role.DECODE: 3}
REDIS: Final = ("alone", "sentinel", "cluster")
# Braces keep all keys of a fleet in one slot of a Redis Cluster.
_PREFIX: Final = "{kvxfer}"
_USER: Final = "control-plane"
_PASSWORD: Final = "word"
# Only the permissions that the documentation requires.
_ACL: Final = ("--user", _USER, "on", f">{_PASSWORD}", f"~{_PREFIX}:*", "+@all", "-@admin")
# The time for a fleet to settle; leases last 6 s.
_PATIENCE_SECONDS: Final = 60.0


class Cluster(Fleet):
    """The cluster's processes. Synchronous methods block: event loops call them in a thread."""

    def __init__(
        self, threads: int, *, redis: str = "alone", continue_streams: bool = False
    ) -> None:
        """Starts all processes. `redis` is one of REDIS."""
        super().__init__()
        self.redis = _redis(redis)
        self.continues_streams = continue_streams
        self._ports = [free_port() for _ in range(REPLICAS)]
        self._balancer = Balancer(self._ports) if redis == "alone" else None
        self.url = ",".join(f"http://127.0.0.1:{port}" for port in self._ports)
        if self._balancer:
            self.url = self._balancer.url
        self._threads = threads
        self._added = dict.fromkeys(WORKERS, 0)

    @property
    def model(self) -> str:
        return str(next(iter(self.workers.values())).ready()["model"])

    def close(self) -> None:
        super().close()
        if self._balancer:
            self._balancer.close()
        self.redis.close()

    def start_all(self) -> None:
        if isinstance(self.redis, FailingOver):
            self.redis.start()
        for number in range(REPLICAS):
            self.start_replica(number)
        added = [self._add(role) for role, number in WORKERS.items() for _ in range(number)]
        self.start_router(*(["--continue-streams"] if self.continues_streams else []))
        for worker in added:
            worker.ready()

    def start_replica(self, number: int) -> None:
        """Starts a replica, or starts it again at the same port."""
        self.start(
            *(f"replica-{number}", "serve", "--port", str(self._ports[number])),
            *("--registry-prefix", _PREFIX),
            KVXFER_REGISTRY=self.redis.url.replace("://", f"://{_USER}:{_PASSWORD}@"),
        )

    def add_worker(self, role: Role) -> None:
        """Starts a worker; returns once it accepts requests."""
        self._add(role).ready()

    def _add(self, role: Role) -> Server:
        name = f"{role}-{self._added[role]}"
        self._added[role] += 1
        return self.begin_worker(name, "--threads", str(self._threads), "--blocks", "512")

    async def settled(self, until: Callable[[Mapping[str, Instance]], bool] = bool) -> None:
        """Waits until exactly the running workers are ready, and `until` is true of them."""

        def settled() -> bool:
            return (fleet := self.whole()) is not None and until(fleet)

        await eventually(lambda: asyncio.to_thread(settled), _PATIENCE_SECONDS)

    def audit(self) -> None:
        """Checks that Redis counts the reservations correctly."""
        has = self.redis.master if isinstance(self.redis, FailingOver) else self.redis
        audit(has, _PREFIX)

    async def open_transfers(self) -> int:
        """Waits up to 2 s until no reservation is left. Returns the number of reservations."""

        async def given_back() -> bool:
            return not await asyncio.to_thread(self.client.transfers)

        with contextlib.suppress(TimeoutError):
            await eventually(given_back, 2)
        return len(await asyncio.to_thread(self.client.transfers))


def _redis(kind: str) -> RedisServer | FailingOver:
    if kind == "sentinel":
        return Watched(*_ACL)
    return Clustered(*_ACL, prefix=_PREFIX) if kind == "cluster" else RedisServer(*_ACL)
