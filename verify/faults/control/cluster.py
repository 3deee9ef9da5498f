"""The cluster: Redis, replicas of the control plane behind one address, workers, the router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable
from typing import Any, Final, Self

from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.demo.children import Child
from kvxfer.errors import KvxferError
from kvxfer.instances import Instance, InstanceState, Role
from verify.processes.programs import free_port
from verify.redis_server import RedisServer

from .balancer import Balancer

REPLICAS: Final = 3
WORKERS: Final = {Role.PREFILL: 3, Role.DECODE: 3}
_START_SECONDS: Final = 120.0
# For a fleet to be as it should; leases last 6 s.
_PATIENCE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1


class Cluster:
    """Loop only; use it inside `async with`. No process is left behind."""

    def __init__(self, threads: int) -> None:
        self.redis = RedisServer()
        self.workers: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        """Of every worker that ever was, by its id: where it served HTTP."""
        self.model = ""
        self.router = ""
        self._threads = threads
        self._ports = [free_port() for _ in range(REPLICAS)]
        self._replicas: dict[int, Child] = {}
        self._balancer = Balancer(self._ports)
        self._stack = contextlib.AsyncExitStack()
        self._environment = {
            "KVXFER_CLUSTER_KEY": secrets.token_hex(32),
            **dict.fromkeys(("KVXFER_TOKENS_FILE", "KVXFER_TOKEN", "KVXFER_TOKEN_FILE"), ""),
        }
        self._added = dict.fromkeys(WORKERS, 0)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self.redis.close)
            await stack.enter_async_context(self._balancer.serve())
            self._stack = stack
            await asyncio.gather(*(self.start_replica(port) for port in self._ports))
            self.client = await stack.enter_async_context(
                ControlPlaneClient(self._balancer.url, credentials=Credentials())
            )
            for role, number in WORKERS.items():
                for _ in range(number):
                    await self.add_worker(role)
            router = await self._start(
                "router",
                ["router", "--port", "0", "--control-plane", self._balancer.url, "--json"],
            )
            self.router = str((await router.ready(_START_SECONDS))["url"])
            await self.whole()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in (*self.workers.values(), *self._replicas.values()):
            child.terminate()
        await self._stack.aclose()

    # --- processes ---------------------------------------------------------------------------

    async def start_replica(self, port: int) -> None:
        options = ["--port", str(port), "--registry", self.redis.url, "--json"]
        self._replicas[port] = await self._start(f"replica {port}", ["serve", *options])
        await self._replicas[port].ready(_START_SECONDS)

    async def add_worker(self, role: Role) -> str:
        """Starts one; returns its id once it takes requests."""
        instance_id = f"{role}-{self._added[role]}"
        self._added[role] += 1
        options = ["--instance-id", instance_id, "--control-plane", self._balancer.url, "--json"]
        options += ["--threads", str(self._threads), "--blocks", "512"]
        worker = await self._start(instance_id, ["worker", "--role", role, *options])
        ready = await worker.ready(_START_SECONDS)
        self.workers[instance_id] = worker
        self.addresses[instance_id] = str(ready["http_address"])
        self.model = str(ready["model"])
        return instance_id

    def kill_replica(self, number: int) -> int:
        """kill -9; returns the port that nobody listens on any more."""
        port = self._ports[number]
        os.kill(self._replicas[port].pid, signal.SIGKILL)
        return port

    def kill_worker(self, instance_id: str) -> None:
        os.kill(self.workers.pop(instance_id).pid, signal.SIGKILL)

    async def left(self, instance_id: str) -> int:
        """Waits until a worker has exited by itself; returns its exit code."""
        worker = self.workers.pop(instance_id)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await worker.exit_code()

    async def _start(self, name: str, arguments: list[str]) -> Child:
        return await self._stack.enter_async_context(Child(name, arguments, self._environment))

    # --- the fleet ---------------------------------------------------------------------------

    async def whole(self, until: Callable[[dict[str, Instance]], bool] = bool) -> None:
        """Waits until exactly the workers that live are ready, and `until` is true of them."""
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                fleet = await self.fleet()
                ready = all(each.state is InstanceState.READY for each in fleet.values())
                if set(fleet) == set(self.workers) and ready and until(fleet):
                    return
                await asyncio.sleep(_POLL_SECONDS)

    async def fleet(self) -> dict[str, Instance]:
        """As a replica tells it; empty where none can."""
        try:
            return {each.instance_id: each for each in await self.client.instances()}
        except KvxferError:
            return {}

    async def open_transfers(self) -> int:
        """Reservations once they had the time to be given back."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while await self.client.transfers():  # noqa: ASYNC110 (of another process)
                    await asyncio.sleep(_POLL_SECONDS)
        return len(await self.client.transfers())

    async def leaked_blocks(self, http: Any) -> int:
        """KV blocks that idle workers still hold."""
        leaked = 0
        for instance_id in self.workers:
            health = (await http.get(f"{self.addresses[instance_id]}/healthz")).json()
            leaked += health["blocks"] - health["free_blocks"]
        return leaked
