"""Which machine the figures belong to."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """CPU model as the kernel names it, cores that this process may use, kernel release, and the
    load average of the minute before the run: what else the machine had to do."""

    cpu: str
    cores: int
    kernel: str
    load_average: float


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """Called before anything is measured."""
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
