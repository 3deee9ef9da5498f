"""Control plane, router and workers as processes that a test freezes and kills."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx

from verify.polling import eventually

BLOCKS = 512
# Nobody loses a lease or a peer because the machine is busy or stalls.
_LEASE_SECONDS: Final = "60"
_PEER_SECONDS: Final = "30"
_HTTP: Final = httpx.Client(timeout=60, trust_env=False)


class Cluster:
    """Processes by name, and where they can be reached. `serve` are further options of the control
    plane; `traced` sends the spans of all others there."""

    def __init__(self, model: Path, *serve: str, traced: bool = False) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVXFER_", "OTEL_"))}
        self._environment = {**kept, "KVXFER_CLUSTER_KEY": "0123456789abcdef" * 2}
        self._model = model
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._urls: dict[str, str] = {}
        self._start("control", "serve", "--port", "0", *("--lease-seconds", _LEASE_SECONDS), *serve)
        self.control_plane = self._url("control", "url")
        self._environment["KVXFER_CONTROL_PLANE"] = self.control_plane
        if traced:
            self._environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = self.control_plane
        self._start("router", "router", "--port", "0", "--bytes-per-token", "1")
        self.router = self._url("router", "url")
        self._start("brokering", "router", "--port", "0", "--handshake", "brokered")
        self.brokering_router = self._url("brokering", "url")

    @property
    def running(self) -> set[str]:
        """The names of its processes."""
        return set(self._processes)

    def workers(self, *names: str) -> None:
        """Starts those that do not run, and returns when they are in the fleet."""
        missing = [name for name in names if name not in self._processes]
        for name in missing:
            self._start(
                name,
                *("worker", "--role", name.partition("-")[0], "--instance-id", name),
                *("--model", str(self._model), "--blocks", str(BLOCKS), "--threads", "1"),
                *("--peer-timeout", _PEER_SECONDS),
            )
        for name in missing:
            self._urls[name] = self._url(name, "http_address")

    def add(self, name: str, *arguments: str) -> str:
        """Starts one more process; returns its URL."""
        self._start(name, *arguments)
        return self._url(name, "url")

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """It runs again in the end, unless it was killed meanwhile."""
        process = self._processes[name]
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        """kill -9. Its lease goes on; `bury` ends it."""
        process = self._processes.pop(name)
        process.kill()
        process.communicate()

    def bury(self) -> None:
        """Ends the leases of those that were killed: their names are free again."""
        for instance in _HTTP.get(f"{self.control_plane}/v1/instances").json()["instances"]:
            name, epoch = instance["instance_id"], instance["epoch"]
            if name not in self._processes:
                url = f"{self.control_plane}/v1/instances/{name}"
                _HTTP.delete(url, params={"epoch": epoch}).raise_for_status()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def instances(self) -> list[str]:
        found = _HTTP.get(f"{self.control_plane}/v1/instances").json()["instances"]
        return [instance["instance_id"] for instance in found]

    def open_transfers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]]
        found = _HTTP.get(f"{self.control_plane}/v1/transfers").json()["transfers"]
        return found

    def idle(self) -> bool:
        """Whether no reservation is open, every block of every worker is free, and the control
        plane knows that: it would pair others otherwise."""
        health = [
            _HTTP.get(f"{url}/healthz").json()
            for name, url in self._urls.items()
            if name in self._processes
        ]
        busy = any(h["free_blocks"] != BLOCKS or h["running"] for h in health)
        return not busy and not self.open_transfers() and not self._reported_busy()

    def _reported_busy(self) -> bool:
        found = _HTTP.get(f"{self.control_plane}/v1/instances").json()["instances"]
        return any(
            # A transfer that decode has not told of since counts against it as well.
            one["started"]
            or one["load"]["running"]
            or one["load"]["free_blocks"] not in (None, BLOCKS)
            for one in found
            if one["instance_id"] in self._processes
        )

    def metric(self, name: str, url: str | None = None) -> float:
        """A metric of the router, or of what is at another URL."""
        lines = _HTTP.get(f"{url or self.router}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def _start(self, name: str, *arguments: str) -> None:
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.cli", *arguments, "--json"],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _url(self, name: str, key: str) -> str:
        output = self._processes[name].stdout
        assert output is not None
        return str(json.loads(output.readline())[key])


async def until(condition: Callable[[], Any]) -> None:
    """Returns when `condition`, which blocks, holds."""
    await eventually(lambda: asyncio.to_thread(condition), 120)
