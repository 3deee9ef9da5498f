"""Processor time of the measured servers."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from verify.processes.process import Process

_TICKS: Final = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: Process) -> float:
    """Returns the user and system time of all processes of its group so far."""
    total, found = 0.0, False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == process.pid:  # the process group
                total += (int(fields[11]) + int(fields[12])) / _TICKS
                found = True
    if not found:
        raise RuntimeError(f"no process of {process.name} was found")
    return total
