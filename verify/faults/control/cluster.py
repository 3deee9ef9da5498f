"""The cluster: Redis, replicas of the control plane behind one address, workers, the router."""

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
from verify.redis_server import RedisServer

REPLICAS: Final = 3
WORKERS: Final = {Role.PREFILL: 3, Role.DECODE: 3}
# The time for a fleet to settle; leases last 6 s.
_PATIENCE_SECONDS: Final = 60.0


class Cluster(Fleet):
    """Synchronous methods block: event loops call them in a thread."""

    def __init__(self, threads: int) -> None:
        super().__init__()
        self.redis = RedisServer()
        self._balancer = Balancer(free_port() for _ in range(REPLICAS))
        self.url = self._balancer.url
        self._threads = threads
        self._added = dict.fromkeys(WORKERS, 0)

    @property
    def model(self) -> str:
        return str(next(iter(self.workers.values())).ready()["model"])

    def close(self) -> None:
        super().close()
        self._balancer.close()
        self.redis.close()

    def start_all(self) -> None:
        for number in range(REPLICAS):
            self.start_replica(number)
        added = [self._add(role) for role, number in WORKERS.items() for _ in range(number)]
        self.start_router()
        for worker in added:
            worker.ready()

    def start_replica(self, number: int) -> None:
        """Starts it, or starts it again at the same port."""
        options = ["--port", str(self._balancer.ports[number]), "--registry", self.redis.url]
        self.start(f"replica-{number}", "serve", *options)

    def add_worker(self, role: Role) -> None:
        """Starts one; returns once it takes requests."""
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

    async def open_transfers(self) -> int:
        """The number of reservations, after the time in which they are given back."""

        async def given_back() -> bool:
            return not await asyncio.to_thread(self.client.transfers)

        with contextlib.suppress(TimeoutError):
            await eventually(given_back, 2)
        return len(await asyncio.to_thread(self.client.transfers))
