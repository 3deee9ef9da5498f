"""Runs the test suite several times on a busy machine that stalls. Prints the tests that failed.

Two processes keep the cores busy. Every ten seconds all processes of the suite are stopped for a
second. A test that fails in any run is a defect of the product or of the test.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from kvxfer.clock import SYSTEM_CLOCK
from verify.arguments import above_zero

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "build/stability"

_BUSY: Final = 2
_EVERY_SECONDS: Final = 10.0
_STOPPED_SECONDS: Final = 1.0

_PYTEST: Final = re.compile(r"^(?:FAILED|ERROR) (\S+(?: .*?)?)(?: - (.*))?$", re.MULTILINE)
_DOCTEST: Final = re.compile(r"^TEST CASE: +(.+)\n(?:.*\n){0,6}?.*ERROR: (.*)$", re.MULTILINE)
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass
class Failures:
    """The tests that failed, with their runs and the first failure."""

    runs: dict[str, set[int]] = field(default_factory=lambda: collections.defaultdict(set))
    how: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, run: int, how: str) -> None:
        self.runs[name].add(run)
        self.how.setdefault(name, how)


def failed_in(log: str) -> Iterator[tuple[str, str]]:
    """Yields the failed tests in a log of scripts/test, each with the line that says how."""
    for found in (*_PYTEST.finditer(log), *_DOCTEST.finditer(log)):
        yield found[1], found[2] or ""


def descendants(of: int) -> list[int]:
    """Returns the processes below one, parents before their children."""
    children: dict[int, list[int]] = collections.defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                children[int(after_name[1])].append(int(entry.name))
    found = [of]
    for pid in found:
        found += children[pid]
    return found[1:]


def state(pid: int) -> str:
    """Returns the state in /proc, such as R, S, T (stopped) or Z (ended); empty if there is no such
    process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Stalls:
    """A thread that stops all descendants of this process but `others` for a second, every ten
    seconds.

    It stops parents before their children, so no test notices that a child is stopped. A process
    that a test has stopped stays stopped.
    """

    def __init__(self, others: set[int]) -> None:
        self.count = 0
        self._others = others
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            stopped: list[int] = []
            try:
                while self._stop_the_rest(stopped):
                    pass
                self.count += 1
                self._ended.wait(_STOPPED_SECONDS)
            finally:
                for pid in reversed(stopped):
                    _signal(pid, signal.SIGCONT)

    def _stop_the_rest(self, stopped: list[int]) -> bool:
        """Stops the processes that are not stopped yet. Returns whether there were any: then a
        process may have forked before it was stopped.

        Signals each process once. A process that waits for its child to exec stops only after
        that, and the child may have been stopped before.
        """
        before = len(stopped)
        told = {*stopped, *self._others}
        for pid in descendants(os.getpid()):
            runs = pid not in told and state(pid) not in ("T", "Z", "")
            if runs and _signal(pid, signal.SIGSTOP):
                stopped.append(pid)
        return len(stopped) > before


def _signal(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def busy_processes() -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(_BUSY):
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.kill)
        yield


def left_behind(others: set[int]) -> Iterator[str]:
    """Ends the processes that the suite left behind, and names them."""
    for pid in descendants(os.getpid()):
        if pid in others:
            continue
        if state(pid) not in ("Z", ""):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").strip()
            _signal(pid, signal.SIGKILL)
            yield f"{pid} {command.decode(errors='replace')}"
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def one_run(log: Path, command: list[str]) -> tuple[int, int, list[str]]:
    """Runs the suite once. Returns the exit status, the number of stalls, and the processes that
    the suite left behind."""
    with log.open("wb") as out, busy_processes():
        busy = set(descendants(os.getpid()))
        suite = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            with Stalls(busy) as stalls:
                status = suite.wait()
        finally:
            left = list(left_behind(busy))
    return status, stalls.count, left


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test SUITE=stability", description=__doc__)
    parser.add_argument("--runs", type=above_zero, default=3, help="number of runs (default: 3)")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; by default all tests")
    options = parser.parse_args()
    # Processes whose parent has ended become children of this process, so it stops and sees them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("test-stability: ended by SIGTERM"))
    # Also handled in the background of a script, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    WORK.mkdir(parents=True, exist_ok=True)
    console = Console()
    failures, bad = Failures(), 0
    for number in range(1, options.runs + 1):
        began = SYSTEM_CLOCK.monotonic()
        with console.status(f"run {number} of {options.runs}"):
            log = WORK / f"run-{number}.log"
            status, stalls, left = one_run(log, ["scripts/test", *options.tests])
        for name, how in failed_in(log.read_text(errors="replace")):
            failures.add(name, number, how)
        minutes = (SYSTEM_CLOCK.monotonic() - began) / 60
        failed = sum(number in runs for runs in failures.runs.values())
        bad += bool(status or left)
        console.print(
            f"run {number}: {'passed' if status == 0 else f'exit status {status}'}, "
            f"{failed} tests failed, {stalls} stalls of {_STOPPED_SECONDS:.0f} s, "
            f"{minutes:.1f} minutes; log: build/stability/run-{number}.log"
        )
        for process in left:
            console.print(f"  left behind: {process}", markup=False, style="red")
    if failures.runs:
        table = Table("test", "failed", "how")
        table.columns[0].overflow = "fold"
        for name, runs in sorted(failures.runs.items(), key=lambda item: -len(item[1])):
            table.add_row(name, f"{len(runs)} of {options.runs}", failures.how[name])
        console.print(table)
    console.print(f"{options.runs - bad} of {options.runs} runs passed")
    return 1 if bad else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("test-stability: interrupted")
