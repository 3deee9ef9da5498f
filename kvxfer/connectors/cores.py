"""The cores of the transfer engine, where vLLM binds its CPU worker to those that it keeps busy."""

from __future__ import annotations

import contextlib
import os
from typing import Final

# What has libgomp or libiomp bind the thread that loads them, and so all that it starts.
_BINDING: Final = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def leave_openmp_cores() -> None:
    """Lets the calling thread, and those it starts, run wherever the process that started this one
    may, if OpenMP has bound this one."""
    if not any(name in os.environ for name in _BINDING):
        return
    with contextlib.suppress(OSError):  # the other process is gone, or in another cpuset
        cores = os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
