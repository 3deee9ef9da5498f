"""A fleet with a tiny model, whose processes a test freezes and kills."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvxfer.transfers import Transfer
from verify.polling import eventually
from verify.processes.fleet import Fleet
from verify.processes.programs import http

BLOCKS: Final = 512
# On a busy machine no lease ends and no peer is lost. The control plane learns up to a third of the
# lease later that a worker is idle, for which most tests wait.
_LEASE_SECONDS: Final = "12"
_PEER_SECONDS: Final = "30"


class Cluster(Fleet):
    """A control plane, a router, and a router with brokered handshakes. `serve` are further options
    of the control plane; with `traced`, all others send their spans there."""

    def __init__(self, model: Path, *serve: str, traced: bool = False) -> None:
        super().__init__()
        self._model, self._serve, self._traced = model, serve, traced

    def start_all(self) -> None:
        self.start_control_plane("--lease-seconds", _LEASE_SECONDS, *self._serve)
        if self._traced:
            self.variables["OTEL_EXPORTER_OTLP_ENDPOINT"] = self.url
        self.start_router()
        self.brokering = self.start_router("--handshake", "brokered", name="brokering")

    def start_workers(self, *names: str) -> None:
        """Starts those that are not running; returns when they are ready."""
        options = ("--blocks", str(BLOCKS), "--threads", "1", "--peer-timeout", _PEER_SECONDS)
        missing = [name for name in names if name not in self.running]
        for worker in [self.begin_worker(n, "--model", self._model, *options) for n in missing]:
            worker.ready()

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """Freezes a process, which runs again at the end unless it was killed."""
        server = self.running[name]
        server.freeze()
        try:
            yield
        finally:
            if self.running.get(name) is server:
                server.resume()

    def bury(self) -> None:
        """Ends the leases of killed workers, so that their names are free again."""
        for name, one in self.instances().items():
            if name not in self.running:
                self.client.deregister(name, one.epoch)

    def transfers(self) -> list[Transfer]:
        return self.client.transfers()

    def idle(self) -> bool:
        """Whether no reservation is open, every block of every worker is free, and the control
        plane knows it; otherwise it would pair other workers."""
        health = [worker.get("/healthz").json() for worker in self.workers.values()]
        busy = any(h["free_blocks"] != BLOCKS or h["running"] for h in health)
        return not busy and not self.transfers() and not self._reported_busy()

    def _reported_busy(self) -> bool:
        return any(
            # A transfer that decode has not reported since counts against it as well.
            one.started or one.load.running or one.load.free_blocks not in (None, BLOCKS)
            for name, one in self.instances().items()
            if name in self.running
        )

    def metric(self, name: str, url: str = "") -> float:
        """A metric of the router, or of the server at another URL."""
        lines = http().get(f"{url or self.router.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def until(condition: Callable[[], object]) -> None:
    """Returns when `condition`, which blocks, is true."""
    await eventually(lambda: asyncio.to_thread(condition), 120)
