"""The servers of a run: a control plane, two workers, the router and the pass-through."""

from __future__ import annotations

import sys
import time
from typing import Final

from benchmarks.router.figures import PASS_THROUGH
from benchmarks.router.requests import MODEL
from kvxfer.instances import InstanceState, Role
from verify.processes.control_plane import worker
from verify.processes.cores import on_cores
from verify.processes.fleet import Fleet
from verify.processes.process import ROOT
from verify.processes.programs import Server, clean_environment

# More than the open transfers of all streams reserve.
_BLOCKS: Final = 1 << 20
# Longer than a run: nothing renews the leases.
_LEASE_SECONDS: Final = 3600


class RouterFleet(Fleet):
    """A fleet whose workers compute nothing, with a pass-through to its decode worker."""

    def __init__(self, rate: float, core: set[int]) -> None:
        """Prepares a fleet. `rate` is the tokens per second of each stream. `core` is for the
        router and the pass-through; everything else runs where this process may."""
        super().__init__(PYTHONPATH=str(ROOT))
        self._rate, self._core = rate, core

    def start_all(self) -> None:
        self.start_control_plane("--lease-seconds", str(_LEASE_SECONDS))
        for role in (Role.PREFILL, Role.DECODE):
            url = self._module(role.value, "worker", "--rate", f"{self._rate:g}").url
            spec = worker(role.value, role, model=MODEL, http_address=url, num_blocks=_BLOCKS)
            self.client.register(spec, state=InstanceState.READY)
        with on_cores(self._core):
            self.start_router()
            self._module(PASS_THROUGH, "passthrough", "--worker", self.running["decode"].url)

    def cpu_seconds(self, name: str) -> float:
        """Returns the processor time of a process so far, by its clock (clock_getcpuclockid): /proc
        has it in units of 10 ms."""
        return time.clock_gettime(~self.running[name].pid << 3 | 2)

    def _module(self, name: str, module: str, *options: str) -> Server:
        command = (sys.executable, "-m", f"benchmarks.router.{module}", *options)
        environment = clean_environment(**self.variables)
        server = self.add(Server(name, *command, folder=self.folder, environment=environment))
        server.ready()
        return server
