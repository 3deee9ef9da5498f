"""The stalls of `make test SUITE=stability`, and its reading of a suite's log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from verify import stability
from verify.polling import wait_until

pytestmark = pytest.mark.native

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]

# The child opens a file before its exec, and until then shares the parent's memory.
_SPAWNS = """
import os, sys
opened = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
os.waitpid(os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[opened]), 0)
"""

LOG = """\
===============================================================================
engine_native/tests/engine/test_faults.cpp:40:
TEST CASE:  a killed peer is named

engine_native/tests/engine/test_faults.cpp:52: ERROR: CHECK( lost ) is NOT correct!
[doctest] test cases:     57 |     56 passed | 1 failed | 98 skipped
=========================== short test summary info ============================
SKIPPED [1] tests/page/looks.py:14: run by `make test SUITE=page`
FAILED tests/kv/test_lease.py::test_a_lease_ends[local - tcp] - assert 1 == 2
ERROR tests/api/test_scale.py::test_plan
2 failed, 10 passed in 4.20s
"""


def test_failures_of_both_runners_are_read() -> None:
    assert dict(stability.failed_in(LOG)) == {
        "a killed peer is named": "CHECK( lost ) is NOT correct!",
        "tests/kv/test_lease.py::test_a_lease_ends[local - tcp]": "assert 1 == 2",
        "tests/api/test_scale.py::test_plan": "",
    }


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen(SLEEPER) for _ in range(2)]
    yield found
    for process in found:
        process.kill()
        process.wait()


def test_a_stall_stops_running_processes_and_leaves_those_that_a_test_has_stopped(
    sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, frozen = (process.pid for process in sleepers)
    os.kill(frozen, signal.SIGSTOP)
    monkeypatch.setattr(stability, "_EVERY_SECONDS", 0.1)
    others = {*stability.descendants(os.getpid())} - {running, frozen}
    with stability.Stalls(others) as stalls:
        wait_until(lambda: stability.state(running) == "T")
        wait_until(lambda: stability.state(running) != "T")
        wait_until(lambda: stalls.count >= 2)
    assert stability.state(running) != "T"
    assert stability.state(frozen) == "T"


def test_a_process_that_waits_for_its_child_to_exec_does_not_delay_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "_EVERY_SECONDS", 0.1)
    others = {*stability.descendants(os.getpid())}
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen([sys.executable, "-c", _SPAWNS, str(fifo)]) as process:
        wait_until(lambda: len({*stability.descendants(os.getpid())} - others) == 2)
        with stability.Stalls(others) as stalls:
            wait_until(lambda: stalls.count >= 2)
        fifo.write_bytes(b"")  # lets the child continue to its exec
    assert process.returncode == 0


def test_processes_that_a_suite_leaves_behind_are_named_and_ended(tmp_path: Path) -> None:
    leaves = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(600)']); print(child.pid)"
    )
    # A separate process, which becomes the parent of the processes left behind.
    program = (
        "import sys, ctypes; from pathlib import Path; from verify import stability; "
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0); "
        "print(stability.one_run(Path(sys.argv[1]), [sys.executable, '-c', sys.argv[2]]))"
    )
    log = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(log), leaves],
        capture_output=True,
        text=True,
        check=True,
        cwd=stability.ROOT,
    )
    pid = int(log.read_text())
    assert f"'{pid} " in ran.stdout
    assert not Path(f"/proc/{pid}").exists()
