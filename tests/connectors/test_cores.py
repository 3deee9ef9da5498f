"""The transfer engine's thread in a worker that OpenMP has bound to cores."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.native

# libgomp binds the worker that vLLM starts in this way.
_WORKER = """
import os, threading
from kvxfer.connectors.cores import leave_openmp_cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
bound = os.sched_getaffinity(0)
found = []
def agent():
    leave_openmp_cores()
    engine = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    engine.start()
    engine.join()
thread = threading.Thread(target=agent)
thread.start()
thread.join()
assert os.sched_getaffinity(0) == bound, "the worker's own thread has moved"
print(*sorted(found[0]))
"""


@pytest.mark.parametrize("binding", ["OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", ""])
def test_threads_leave_only_the_cores_of_openmp(binding: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    environment = {"PATH": os.environ["PATH"], **({binding: "true"} if binding else {})}
    found = subprocess.run(
        [sys.executable, "-c", _WORKER], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [str(core) for core in (allowed if binding else allowed[:1])]
