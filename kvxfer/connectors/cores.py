"""The cores of the transfer engine, beside those to which vLLM binds its CPU worker."""

from __future__ import annotations

import contextlib
import os
from typing import Final

# Variables that make libgomp or libiomp bind the thread that loads it, and threads it starts.
_BINDING: Final = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def leave_openmp_cores() -> None:
    """Lets the calling thread, and threads that it starts, run on all cores of the parent process
    if OpenMP has bound this process."""
    if not any(name in os.environ for name in _BINDING):
        return
    with contextlib.suppress(OSError):  # the parent has ended, or is in another cpuset
        cores = os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
