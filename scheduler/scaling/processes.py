"""Workers as processes of this host: `kvxfer worker`, started and stopped by the control plane.

For development. The processes belong to the replica that started them and end with it, so this
backend is for a control plane of one replica. Its fence can only be checked right before each start
and stop, and no other replica can take back a process that is starting.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvxfer.child_process import Child
from kvxfer.client import ENVIRONMENT as CONTROL_PLANE
from kvxfer.errors import ProcessFailed
from kvxfer.instances import Instance, Role
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.backend import Fence, ScalingBackend
from kvxfer.scheduler.scaling.drain import drain
from kvxfer.scheduler.scaling.policy_file import ProcessesConfig

_log = logging.getLogger("kvxfer.scaling")

_START_SECONDS: Final = 300.0


@dataclass(eq=False, slots=True)
class _Worker:
    instance_id: str
    role: Role
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class ProcessBackend(ScalingBackend):
    """A backend that owns its worker processes; `close` ends them all.

    The workers have this process's environment: their token, the CA of the control plane, and the
    cluster key if there is no `cluster_key_file`.
    """

    name = "processes"

    def __init__(
        self,
        registry: Registry,
        config: ProcessesConfig,
        *,
        control_plane: str,
        cluster_key_file: Path | None = None,
        ticket_keys_file: Path | None = None,
    ) -> None:
        self._registry = registry
        self._config = config
        self._environment = {CONTROL_PLANE: control_plane}
        self._arguments = list(config.arguments)
        if cluster_key_file is not None:
            self._arguments += ["--cluster-key-file", str(cluster_key_file)]
        if ticket_keys_file is not None:
            self._arguments += ["--ticket-keys-file", str(ticket_keys_file)]
        self._workers: list[_Worker] = []

    async def requested(self, role: Role) -> int:
        return len(self._staying(role))

    async def scale(self, role: Role, wanted: int, fence: Fence) -> None:
        while len(self._staying(role)) < wanted:
            await fence()
            self._start(role)
        surplus = len(self._staying(role)) - wanted
        if surplus <= 0:
            return
        leaving = leave_first(
            [worker.instance_id for worker in self._staying(role)],
            {instance.instance_id: instance for instance in await self._registry.instances()},
        )[:surplus]
        for worker in self._staying(role):
            if worker.instance_id in leaving:
                await fence()
                worker.leaving.set()

    async def close(self) -> None:
        tasks = [worker.task for worker in self._workers if worker.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _staying(self, role: Role) -> list[_Worker]:
        return [w for w in self._workers if w.role is role and not w.leaving.is_set()]

    def _start(self, role: Role) -> None:
        worker = _Worker(f"{role}-{secrets.token_hex(4)}", role)
        self._workers.append(worker)
        worker.task = asyncio.create_task(self._live(worker), name=worker.instance_id)

    async def _live(self, worker: _Worker) -> None:
        """Runs the worker's process from its start to its end."""
        arguments = ["worker", "--role", worker.role, "--instance-id", worker.instance_id, "--json"]
        try:
            name = f"{worker.role} worker {worker.instance_id}"
            async with Child(name, [*arguments, *self._arguments], self._environment) as child:
                exited = asyncio.create_task(child.fail_on_exit())
                leaving = asyncio.create_task(self._leave(worker, child))
                try:
                    ended, _ = await asyncio.wait(
                        (exited, leaving), return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ended:
                        task.result()
                finally:
                    exited.cancel()
                    leaving.cancel()
                    await asyncio.gather(exited, leaving, return_exceptions=True)
        except ProcessFailed as error:
            left = worker.leaving.is_set() and error.exit_code == 0
            _log.log(logging.INFO if left else logging.ERROR, "%s", error)
        except OSError as error:
            _log.error("worker %s could not be started: %s", worker.instance_id, error)
        finally:
            self._workers.remove(worker)

    async def _leave(self, worker: _Worker, child: Child) -> None:
        """Returns when the worker may be stopped: it was told to leave, and its time is over."""
        await child.ready(_START_SECONDS)
        await worker.leaving.wait()
        await drain(self._registry, worker.instance_id, seconds=self._config.drain_seconds)


def leave_first(own: list[str], fleet: Mapping[str, Instance]) -> list[str]:
    """Returns the ids in the order in which they should leave: not yet registered, then the least
    busy, among these the youngest."""

    def order(instance_id: str) -> tuple[int, float]:
        instance = fleet.get(instance_id)
        if instance is None:
            return -1, 0.0
        load = instance.load
        busy = load.running + load.waiting + instance.reserved.transfers
        return busy, -instance.registered_at

    return sorted(own, key=order)
