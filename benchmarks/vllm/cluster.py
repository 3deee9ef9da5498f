"""A disaggregated pair behind the router, and an aggregated server, all on one host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vllm.notes import NOTES_VARIABLE
from kvxfer.connectors.vllm.quiet_queue import VARIABLE
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server
from verify.vllm.servers import add_vllm, make_model, vllm

_READY_SECONDS = 60.0
# 32 KiB of cache per token: 64 MiB at 2,000 tokens, as models have that people serve.
_SIZES = ("--layers", "8", "--kv-heads", "8", "--head-dim", "64")
_CACHE = ("--kv-cache-memory-bytes", str(512 << 20))
_TICKS = os.sysconf("SC_CLK_TCK")


# A reader that sleeps at once would do so between any two messages.
_QUIET_SECONDS = "0.0001"


@dataclass(frozen=True, slots=True)
class Cluster:
    fleet: Fleet
    model: Path
    aggregated: Server
    notes: Path
    """What the timed connector has noted."""

    @property
    def router(self) -> Server:
        return self.fleet.router

    @property
    def prefill(self) -> Server:
        return self.fleet.running["prefill"]

    @property
    def decode(self) -> Server:
        return self.fleet.running["decode"]

    def start_pair(self) -> None:
        """Both servers, until they are ready."""
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            add_vllm(
                *(self.fleet, name, self.model, *_CACHE),
                role=role,
                connector="TimedConnector",
                module="benchmarks.vllm.timed_connector",
                # Seven processes on the cores of one: time is measured, not stalls.
                peer_timeout=5.0,
            )
        for server in (self.prefill, self.decode):
            server.serves("/health")
        wait_until(self.fleet.whole, _READY_SECONDS)

    def restart_quiet(self) -> None:
        """The pair with readers of vLLM's queue that sleep (kvxfer.connectors.vllm.quiet_queue)."""
        for name in ("prefill", "decode"):
            self.fleet.end(name)
        self.fleet.variables[VARIABLE] = _QUIET_SECONDS
        self.start_pair()


@contextlib.contextmanager
def started(folder: Path, step: Callable[[str], None]) -> Iterator[Cluster]:
    """All of it, ready to serve."""
    notes = folder / "notes"
    os.environ[NOTES_VARIABLE] = str(notes)
    step("making the model")
    model = make_model(folder, *_SIZES)
    step("starting two vLLM servers with kvxfer and one without")
    with (
        Fleet(folder) as fleet,
        vllm("aggregated", folder, model, *_CACHE) as aggregated,
    ):
        fleet.start_control_plane()
        fleet.start_router("--attempts", "1")
        cluster = Cluster(fleet, model, aggregated, notes)
        cluster.start_pair()
        aggregated.serves("/health")
        yield cluster


def cpu_seconds(server: Server) -> float:
    """User and system time of all processes of a server so far."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == server.pid:  # the process group
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    if not total:
        raise RuntimeError(f"no process of {server.name} was found")
    return total
