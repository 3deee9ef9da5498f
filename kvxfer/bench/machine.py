"""Which machine the figures belong to."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvxfer.bench.figures import Machine


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """CPU model as the kernel names it, cores this process may use, kernel release."""
    names = [
        line.partition(":")[2].strip()
        for line in cpuinfo.read_text().splitlines()
        if line.startswith("model name")
    ]
    return Machine(
        cpu=names[0] if names else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
    )
