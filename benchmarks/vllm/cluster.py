"""A disaggregated pair behind the router, and an aggregated server, all on one host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vllm.notes import NOTES_VARIABLE
from kvxfer.bench.targets import VLLM_CROWD
from kvxfer.connectors.vllm.quiet_queue import VARIABLE
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server, free_port
from verify.processes.vllm.servers import add_vllm, make_model, vllm

_READY_SECONDS = 60.0
# 32 KiB of cache per token, 64 MiB at 2,000 tokens: like models in production.
_SIZES = ("--layers", "8", "--kv-heads", "8", "--head-dim", "64")
_LIMITS = ("--kv-cache-memory-bytes", str(512 << 20), "--max-num-seqs", str(VLLM_CROWD))
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_CONNECTORS = "benchmarks.vllm.timed_connector"
_QUIET_SECONDS = "0"


@dataclass(frozen=True, slots=True)
class Cluster:
    fleet: Fleet
    model: Path
    aggregated: Server
    """The server without a connector."""
    notes: Path
    """The notes of the timed connector."""

    @property
    def router(self) -> Server:
        return self.fleet.router

    @property
    def prefill(self) -> Server:
        return self.fleet.running["prefill"]

    @property
    def decode(self) -> Server:
        return self.fleet.running["decode"]

    def start_pair(self, *, quiet: bool) -> None:
        """Starts both servers with kvxfer, and waits until they are ready. With `quiet`, readers of
        vLLM's queue sleep (kvxfer.connectors.vllm.quiet_queue)."""
        self._end_pair()
        if quiet:
            self.fleet.variables[VARIABLE] = _QUIET_SECONDS
        for name, role in _ROLES.items():
            add_vllm(
                *(self.fleet, name, self.model, *_LIMITS),
                role=role,
                connector="TimedConnector",
                module=_CONNECTORS,
                # Seven processes share few cores: a long timeout, as stalls are not the subject.
                peer_timeout=5.0,
            )
        for server in (self.prefill, self.decode):
            server.serves("/health")
        wait_until(self.fleet.whole, _READY_SECONDS)

    def start_nixl_pair(self) -> None:
        """Starts a pair with vLLM's unmodified NixlConnector in place of kvxfer's pair."""
        self._end_pair()
        for name, role in _ROLES.items():
            transfer = {
                "kv_connector": "TimedNixlConnector",
                "kv_connector_module_path": _CONNECTORS,
                "kv_role": role,
                "kv_buffer_device": "cpu",
            }
            variables = {**self.fleet.variables, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            self.fleet.add(
                vllm(
                    *(name, self.fleet.folder, self.model, *_LIMITS),
                    transfer=transfer,
                    variables=variables,
                )
            )
        for server in (self.prefill, self.decode):
            server.serves("/health")

    def _end_pair(self) -> None:
        for name in _ROLES:
            if name in self.fleet.running:
                self.fleet.end(name)


@contextlib.contextmanager
def started(folder: Path, step: Callable[[str], None]) -> Iterator[Cluster]:
    """Starts the cluster without a pair."""
    notes = folder / "notes"
    os.environ[NOTES_VARIABLE] = str(notes)
    step("making the model")
    model = make_model(folder, *_SIZES)
    step("starting a vLLM server without connector")
    with (
        Fleet(folder) as fleet,
        # Otherwise its readers use a core for a second after a request, which slows the next one.
        vllm(
            *("aggregated", folder, model, *_LIMITS), variables={VARIABLE: _QUIET_SECONDS}
        ) as aggregated,
    ):
        fleet.start_control_plane()
        fleet.start_router("--attempts", "1")
        cluster = Cluster(fleet, model, aggregated, notes)
        aggregated.serves("/health")
        yield cluster
