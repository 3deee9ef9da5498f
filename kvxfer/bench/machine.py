"""The machine that the figures belong to."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path

from kvxfer.engine import Engine
from kvxfer.engine.core import Nic
from kvxfer.version import __version__


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU model as the kernel names it, cores that this process may use, kernel release, and the
    load average of the minute before the run: what else the machine had to do."""

    cpu: str
    cores: int
    kernel: str
    load_average: float


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Describes this machine. Call it before anything is measured."""
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        cpu=names[0] if names else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        load_average=os.getloadavg()[0],
    )


@dataclass(frozen=True, slots=True)
class End:
    """One of the two hosts of a run: its name, kvxfer's version there, what its engine has, and the
    GPU whose memory its pool is (None: host memory)."""

    host: str
    version: str
    machine: Machine
    fabrics: tuple[str, ...]
    nics: list[Nic]
    gpu: int | None


def this_end(engine: Engine, gpu: int | None) -> End:
    """Describes this host and its engine. Call it before anything is measured."""
    host = socket.gethostname()
    return End(host, __version__, this_machine(), engine.fabrics, engine.nics, gpu)
