"""`kvxfer` commands that a process starts, watches, and always stops again."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import IO, Any, Final, Self

from kvxfer.errors import ProcessFailed

_STOP_SECONDS: Final = 4.0
_STDERR_LINES: Final = 3
_LINE_LIMIT: Final = 1 << 20


class Child:
    """One `kvxfer` command as a child process. Loop only.

    Use it as an async context manager: leaving it stops the process, first by SIGTERM. The child
    also gets SIGTERM when this process dies in any other way. Ctrl-C in the terminal reaches this
    process only, which then stops its children in order.
    """

    def __init__(self, name: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self._arguments = arguments
        self._environment = {**os.environ, **environment}
        self._stdout = b""
        self._stderr: collections.deque[str] = collections.deque(maxlen=_STDERR_LINES)

    async def __aenter__(self) -> Self:
        self._process = self._start()
        loop = asyncio.get_running_loop()
        self._first_line: asyncio.Future[bytes] = loop.create_future()
        self._output = asyncio.gather(self._read_stdout(), self._read_stderr())
        # Cancelled on exit, and then not awaited.
        self._output.add_done_callback(lambda output: output.cancelled() or output.exception())
        # Opened before any signal: a signal to a process that has exited reaps it and frees its id.
        self._exit = asyncio.create_task(self._exited(os.pidfd_open(self._process.pid)))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self._exit)
        except TimeoutError:
            self._process.kill()
            await self._exit
        except asyncio.CancelledError:
            self._process.kill()
            raise
        finally:
            self._output.cancel()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Tells the process to stop, without waiting for it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def exit_code(self) -> int:
        """Waits until the process exits, and returns its exit code."""
        return await asyncio.shield(self._exit)

    async def ready(self, seconds: float) -> dict[str, Any]:
        """Returns the first line of its output, a JSON object.

        Raises ProcessFailed if it exits first, or takes longer than `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                line = await asyncio.shield(self._first_line)
                with contextlib.suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        return value
                # The output is an error over several lines, or empty.
                await self.fail_on_exit()
        except TimeoutError:
            pass
        raise ProcessFailed(f"the {self.name} was not ready within {seconds:g} s{self._words()}")

    async def fail_on_exit(self) -> None:
        """Waits until the process exits, then raises ProcessFailed with its last words."""
        code = await asyncio.shield(self._exit)
        await asyncio.wait([self._output])
        how = f"exited with code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        raise ProcessFailed(f"the {self.name} {how}{self._words()}", exit_code=code)

    def _words(self) -> str:
        """Returns the error that it printed, or else the end of its stderr."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(self._stdout)["error"]
            return f": {error['message']} [{error['code']}]"
        return ": " + " | ".join(self._stderr) if self._stderr else ""

    def _start(self) -> subprocess.Popen[bytes]:
        # Not asyncio.create_subprocess_exec: uvloop runs Python's at-fork handlers in the child
        # before it executes the command, and that of OpenTelemetry never returns there.
        return subprocess.Popen(  # noqa: S603 (no shell, and arguments as a list)
            [sys.executable, "-m", "kvxfer.cli.child", str(os.getpid()), *self._arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    async def _exited(self, pidfd: int) -> int:
        """Returns the exit code once the process has exited."""
        loop, exited = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, exited.set)
        try:
            await exited.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    async def _read_stdout(self) -> None:
        async with _reading(self._process.stdout) as stdout:
            self._stdout = await stdout.readline()
            self._first_line.set_result(self._stdout)
            while chunk := await stdout.read(_LINE_LIMIT):
                self._stdout = (self._stdout + chunk)[:_LINE_LIMIT]

    async def _read_stderr(self) -> None:
        async with _reading(self._process.stderr) as stderr:
            async for line in stderr:
                if text := line.decode(errors="replace").strip():
                    self._stderr.append(text)


@contextlib.asynccontextmanager
async def _reading(pipe: IO[bytes] | None) -> AsyncIterator[asyncio.StreamReader]:
    """Yields a reader of the pipe, which is closed afterwards."""
    stream = asyncio.StreamReader(limit=_LINE_LIMIT)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), pipe
    )
    try:
        yield stream
    finally:
        transport.close()
