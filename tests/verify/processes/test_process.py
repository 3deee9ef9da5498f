"""Processes of the harness: none is left behind, and the error of a failed one shows its output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verify.polling import wait_until
from verify.processes.process import Process, ProcessFailed
from verify.processes.worker import WorkerProcess

pytestmark = pytest.mark.native

SLEEPS = "import time; print('{\"up\": true}', flush=True); time.sleep(600)"
# A parent that prints the id of its child, and waits for it.
PARENT = f"""
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPS!r}])
print(json.dumps({{"child": child.pid}}), flush=True)
child.wait()
"""
DRIVER = f"""
import os, signal, sys
from verify.processes.process import Process
left = Process("left", sys.executable, "-c", {SLEEPS!r})
print(left.pid, left.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def python(code: str, **options: float) -> Process:
    return Process("program", sys.executable, "-c", code, **options)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_is_ready_with_its_first_object_and_ends_with_its_block() -> None:
    with python(SLEEPS) as process:
        assert process.ready() == {"up": True}
        assert os.getsid(process.pid) == os.getsid(0)
        folder = process.folder
    assert not running(process.pid)
    assert not folder.exists()


@pytest.mark.parametrize("grace", [0.0, 0.2])
def test_a_frozen_process_ends_with_its_block(grace: float) -> None:
    with python(SLEEPS, grace=grace) as process:
        process.ready()
        process.freeze()
    assert not running(process.pid)


@pytest.mark.parametrize("how", ["kill", "close"])
def test_the_children_of_a_process_end_with_it(how: str) -> None:
    with python(PARENT) as process:
        child = process.ready()["child"]
        getattr(process, how)()
        wait_until(lambda: not running(child))


def test_the_children_of_a_process_end_when_it_ends_by_itself() -> None:
    with python(PARENT.replace("child.wait()", "")) as process:
        child = process.ready()["child"]
        process.ends()
        wait_until(lambda: not running(child))


def test_a_process_ends_with_a_driver_that_is_killed() -> None:
    driver = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    pid, folder = driver.stdout.split()
    wait_until(lambda: not running(int(pid)) and not Path(folder).exists())


def test_the_error_of_a_process_that_ends_before_it_is_ready_has_its_output() -> None:
    with (
        python("import sys; print('to stdout'); sys.exit('to stderr')") as process,
        pytest.raises(ProcessFailed, match=r"program has ended with exit code 1:\n(.*\n)*to std"),
    ):
        process.ready()


def test_the_error_names_a_process_that_does_not_get_ready_or_stop() -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
    with python(code) as process:
        process.ready()
        with pytest.raises(ProcessFailed, match=r"was not ready within 0\.1 s"):
            process.ready(lambda: False, 0.1)
        with pytest.raises(ProcessFailed, match=r"did not end within 0\.1 s"):
            process.stop(seconds=0.1)


def test_stop_requires_exit_code_0() -> None:
    with python(SLEEPS) as process:
        process.ready()
        with pytest.raises(ProcessFailed, match="has ended with SIGTERM"):
            process.stop()


def test_a_restarted_process_is_not_ready_by_its_old_output() -> None:
    with python("print('{\"pid\": %d}' % __import__('os').getpid())") as process:
        first = process.ready()
        process.ends()
        process.start()
        assert process.ready() != first


async def test_a_worker_answers_in_any_order_and_reports_its_end() -> None:
    with WorkerProcess("verify.attack.worker", "prefill", "local") as worker:
        await worker.started()
        answers = [worker.begin("changed"), worker.begin("state")]
        assert answers[1].result()["threads"] > 0
        assert answers[0].result() == {"changed": 0}
        waits = worker.event("never")
        worker.kill()
        with pytest.raises(EOFError, match="prefill has ended"):
            waits.result()
        with pytest.raises(EOFError, match="prefill has ended"):
            worker.ask("state")
