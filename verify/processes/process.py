"""One process: started, awaited, frozen, killed, and always reaped."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from verify.polling import PATIENCE, eventually, wait_until

START_SECONDS: Final = 16 * PATIENCE
"""The longest start of a program: vLLM, or any program on an emulated machine."""

ROOT: Final = Path(__file__).parents[2]


class ProcessFailed(AssertionError):
    """A process ended too early or with the wrong exit code, or was not ready in time."""


class Process:
    """A program in its process group and folder, until its block ends. Any thread.

    It is in its driver's session. Linux shares the cores among sessions (sched_autogroup), and
    programs that spin in one session can deny the cores to other sessions for 15 s and more. The
    program ends with its driver, however the driver ends.
    """

    def __init__(
        self,
        name: str,
        *command: str | Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        grace: float = 0.0,
    ) -> None:
        """Starts the program. `folder` is for its log; by default a temporary folder. `environment`
        is the whole environment. The end of the block sends SIGTERM, and SIGKILL `grace` seconds
        later."""
        self.name = name
        self._command = list(map(str, command))
        self._environment = dict(os.environ if environment is None else environment)
        self._grace = grace
        self._temporary = None if folder else Path(tempfile.mkdtemp(prefix=f"kvxfer-{name}-"))
        self.folder = folder or self._temporary or Path()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / f"{name.replace(' ', '-')}.log"
        """The file with its stdout and stderr."""
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Starts the program, also again after it has ended."""
        with self.log.open("ab") as log:
            self._begun = log.tell()
            self._process = self._popen(log)
        self._reaped = False
        tell_reaper(f"+{self.pid} {self._temporary or ''}")

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            cwd=self._temporary,
            env=self._environment,
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    @property
    def _popened(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"{self.name} does not run"
        return self._process

    @property
    def pid(self) -> int:
        """The id of the process, and of its group."""
        return self._popened.pid

    @property
    def output(self) -> str:
        """The output since the last start; empty once its folder is removed."""
        try:
            return self.log.read_bytes()[self._begun :].decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self, size: int = 6000) -> str:
        return self.output[-size:]

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs. If it has ended, processes that it started are
        killed."""
        code = self._popened.poll()
        if code is not None and not self._reaped:
            self._reaped = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            tell_reaper(f"-{self.pid}")
        return code

    # --- readiness ---------------------------------------------------------------------------

    def first_object(self) -> dict[str, Any] | None:
        """Returns the first line of its output that is a JSON object, as `kvxfer ... --json`
        prints it."""
        for line in self.output.splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(value := json.loads(line), dict):
                    return value
        return None

    def ready(
        self, condition: Callable[[], Any] | None = None, seconds: float = START_SECONDS
    ) -> Any:
        """Waits for a true value of `condition`, by default first_object, and returns it. Raises
        ProcessFailed if the process ends before, or after `seconds`."""
        with self._in_time(seconds):
            return wait_until(lambda: self._while_running(condition), seconds)

    async def becomes_ready(
        self, condition: Callable[[], Any] | None = None, seconds: float = START_SECONDS
    ) -> Any:
        """Does the same as ready() for code with an event loop."""
        with self._in_time(seconds):
            return await eventually(lambda: self._while_running(condition), seconds)

    def _while_running(self, condition: Callable[[], Any] | None) -> Any:
        ended = self.exit_code is not None
        value = (condition or self.first_object)()
        if ended and not value:
            self.check()
        return value

    def check(self) -> None:
        """Raises ProcessFailed if it has ended."""
        if (code := self.exit_code) is not None:
            raise self.failed(f"has ended with {_exit(code)}")

    @contextlib.contextmanager
    def _in_time(self, seconds: float) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise self.failed(f"was not ready within {seconds:g} s") from None

    def failed(self, how: str) -> ProcessFailed:
        """Returns the error, with the end of the log."""
        return ProcessFailed(f"{self.name} {how}:\n{self.tail()}")

    # --- signals -----------------------------------------------------------------------------

    def send(self, number: int) -> None:
        """Sends a signal to all of its group, unless it has ended."""
        if self.exit_code is None:
            os.killpg(self.pid, number)

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it at once, and reaps it."""
        self.send(signal.SIGKILL)
        self._popened.wait()
        assert self.exit_code is not None

    def stop(self, number: int = signal.SIGTERM, seconds: float = PATIENCE) -> None:
        """Ends it with a signal. Raises ProcessFailed unless its exit code is 0."""
        self.send(number)
        self.ends(seconds)

    def ends(self, seconds: float = PATIENCE, code: int = 0) -> None:
        """Waits until it has ended by itself. Raises ProcessFailed for another exit code, or after
        `seconds`."""
        try:
            self._popened.wait(seconds)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {seconds:g} s") from None
        if self.exit_code != code:
            raise self.failed(f"has ended with {_exit(self._popened.returncode)}")

    def close(self) -> None:
        """Ends it if it still runs, even if it is frozen. Removes its temporary folder."""
        if self._process is not None:
            if self._grace:
                self.send(signal.SIGTERM)
                self.resume()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace)
            self.kill()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


_reaper_lock: Final = threading.Lock()


@functools.cache
def _reaper(_driver: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-ES", str(Path(__file__).with_name("reaper.py"))],
        process_group=0,
        stdin=subprocess.PIPE,
    )


def tell_reaper(line: str) -> None:
    """Writes a line to the process that kills what this one leaves (verify/processes/reaper.py)."""
    # Two threads must not make two reapers: the second would end the processes of the first.
    with _reaper_lock, contextlib.suppress(BrokenPipeError):
        stdin = _reaper(os.getpid()).stdin
        assert stdin is not None
        os.write(stdin.fileno(), f"{line}\n".encode())
