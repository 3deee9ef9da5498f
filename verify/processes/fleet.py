"""A fleet of processes: control planes, routers and workers, which come and go by name."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

from kvxfer.client import Credentials, SyncControlPlaneClient
from kvxfer.instances import Instance, InstanceState

from .programs import Server, clean_environment, free_port, kvxfer

CONTROL_PLANE: Final = "control-plane"


class Fleet:
    """A context manager for processes, which end with its block. Any thread. Programs with an event
    loop wait with `eventually(lambda: asyncio.to_thread(fleet.whole))`."""

    def __init__(self, folder: Path | None = None, *, token: str = "", **variables: str) -> None:
        """Makes a fleet without processes. `folder` is for logs; by default a temporary folder.
        `token` is the fleet's token at the control plane. `variables` are environment variables of
        all its processes."""
        self._temporary = None if folder else Path(tempfile.mkdtemp(prefix="kvxfer-fleet-"))
        self.folder = folder or self._temporary or Path()
        self._token = token
        self.running: dict[str, Server] = {}
        """The processes by name. The name of a worker is its instance id."""
        self._workers: set[str] = set()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        """The URL of the control plane."""
        self.variables = {
            "KVXFER_CLUSTER_KEY": secrets.token_hex(32),
            "KVXFER_RUNTIME_DIR": str(self.folder / "runtime"),
            **variables,
        }

    def start_all(self) -> None:
        """Starts the first processes, at the begin of the block. Does nothing here."""

    # --- processes ---------------------------------------------------------------------------

    def add(self, server: Server, *, works: bool = False) -> Server:
        """Adds a running program, which ends with the fleet. `works` marks a worker."""
        self.running[server.name] = server
        if works:
            self._workers.add(server.name)
        return server

    def begin(self, name: str, *arguments: str | Path, url: str = "", **variables: str) -> Server:
        """Starts a `kvxfer` command, and does not wait until it is ready. Only this process gets
        `variables`."""
        environment = clean_environment(
            **{"KVXFER_CONTROL_PLANE": self.url, **self.variables, **variables}
        )
        command = kvxfer(*arguments, "--json")
        return self.add(
            Server(name, *command, url=url, folder=self.folder, environment=environment)
        )

    def start(self, name: str, *arguments: str | Path, **variables: str) -> Server:
        """Starts a `kvxfer` command; returns when it is ready."""
        server = self.begin(name, *arguments, **variables)
        server.ready()
        return server

    def start_control_plane(self, *options: str | Path) -> Server:
        """Starts the control plane, always at the same address."""
        return self.start(CONTROL_PLANE, "serve", "--port", str(self.port), *options)

    def start_router(self, *options: str | Path, name: str = "router", **variables: str) -> Server:
        return self.start(name, "router", "--port", "0", *options, **variables)

    def begin_worker(self, name: str, *options: str | Path, **variables: str) -> Server:
        """Starts a reference worker, whose name begins with its role. Does not wait: use `ready` or
        `whole`."""
        self._workers.add(name)
        role = name.partition("-")[0]
        return self.begin(
            *(name, "worker", "--role", role, "--instance-id", name, *options), **variables
        )

    def kill(self, name: str) -> None:
        """Kills a process with SIGKILL."""
        self.running.pop(name).kill()

    def end(self, name: str) -> None:
        """Ends one process before the end of the fleet."""
        self.running.pop(name).close()

    def left(self, name: str, seconds: float) -> None:
        """Waits until a process has ended by itself, with exit code 0."""
        self.running.pop(name).ends(seconds)

    @property
    def router(self) -> Server:
        return self.running["router"]

    @property
    def workers(self) -> Mapping[str, Server]:
        """The workers that run."""
        return {name: one for name, one in self.running.items() if name in self._workers}

    # --- the control plane's instances -------------------------------------------------------

    @cached_property
    def client(self) -> SyncControlPlaneClient:
        credentials = Credentials(token=self._token or None)
        return SyncControlPlaneClient(self.url, credentials=credentials)

    def instances(self) -> dict[str, Instance]:
        """Returns the instances by id."""
        return {one.instance_id: one for one in self.client.instances()}

    def whole(self) -> dict[str, Instance] | None:
        """Returns the instances if all are ready, and if they are exactly the current processes of
        the workers that run; else None. Raises ProcessFailed if a worker has ended."""
        for worker in self.workers.values():
            worker.check()
        fleet, workers = self.instances(), self.workers
        ready = all(one.state is InstanceState.READY for one in fleet.values())
        addresses = {name: one.http_address for name, one in fleet.items()}
        return fleet if ready and addresses == {n: w.url for n, w in workers.items()} else None

    def held_blocks(self) -> int:
        """Returns the number of KV blocks that reference workers hold."""
        health: list[dict[str, Any]] = [w.get("/healthz").json() for w in self.workers.values()]
        return sum(one["blocks"] - one["free_blocks"] for one in health)

    # --- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            if "client" in self.__dict__:
                stack.callback(self.client.close)
            for server in self.running.values():
                stack.callback(server.close)
        self.running.clear()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
