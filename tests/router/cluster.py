"""Control plane, router and workers as processes that a test freezes and kills."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

BLOCKS = 512


class Cluster:
    """Processes by name, and where they can be reached. `serve` are further options of the control
    plane; `traced` sends the spans of all others there."""

    def __init__(self, model: Path, *serve: str, traced: bool = False) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVXFER_", "OTEL_"))}
        self._environment = {**kept, "KVXFER_CLUSTER_KEY": "0123456789abcdef" * 2}
        self._model = model
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._urls: dict[str, str] = {}
        self._start("control", "serve", "--port", "0", *(serve or ("--lease-seconds", "3")))
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
                # A machine that is very busy takes its time, and frozen ones are to stay unnoticed.
                *("--peer-timeout", "3"),
            )
        for name in missing:
            self._urls[name] = self._url(name, "http_address")

    def add(self, name: str, *arguments: str) -> str:
        """Starts one more process; returns its URL."""
        self._start(name, *arguments)
        return self._url(name, "url")

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """kill -9; the name is free again once its lease has ended."""
        process = self._processes.pop(name)
        process.kill()
        process.communicate()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def instances(self) -> list[str]:
        found = httpx.get(f"{self.control_plane}/v1/instances").json()["instances"]
        return [instance["instance_id"] for instance in found]

    def open_transfers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]]
        found = httpx.get(f"{self.control_plane}/v1/transfers").json()["transfers"]
        return found

    def idle(self) -> bool:
        """Whether no reservation is open, every block of every worker is free, and the control
        plane knows that: it would pair others otherwise."""
        health = [
            httpx.get(f"{url}/healthz").json()
            for name, url in self._urls.items()
            if name in self._processes
        ]
        busy = any(h["free_blocks"] != BLOCKS or h["running"] for h in health)
        return not busy and not self.open_transfers() and not self._reported_busy()

    def _reported_busy(self) -> bool:
        found = httpx.get(f"{self.control_plane}/v1/instances").json()["instances"]
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
        lines = httpx.get(f"{url or self.router}/metrics").text.splitlines()
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


async def until(condition: Any) -> None:
    """Returns when `condition` holds; fails after a minute."""
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 (processes raise no event)
            await asyncio.sleep(0.02)
