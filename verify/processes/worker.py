"""Drives a worker by JSON commands and events, one per line. The worker's side is commands.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, Final, TypeAlias

from .process import ROOT, START_SECONDS, Process

PATIENCE: Final = 60.0
"""The most seconds that a command may take."""
_HANGS_AFTER: Final = 20.0

Event: TypeAlias = dict[str, Any]


class WorkerProcess(Process):
    """A process `python -m MODULE NAME ...`. Any thread.

    An event with the id of a command is its answer. Other events wait for event().
    """

    def __init__(
        self,
        module: str,
        name: str,
        *arguments: str,
        inside: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        python: str | Path = "",
    ) -> None:
        """Starts the process. Returns before the worker is ready. `inside` is a command that runs
        its arguments, for example in a network namespace. `python` is the Python of another
        environment."""
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._answers: dict[int, Future[Event]] = {}
        self._events: list[Event] = []
        self._waiting: list[tuple[tuple[str, ...], Future[Event]]] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._ended = False
        path = os.pathsep.join([str(ROOT), *([] if python else filter(None, sys.path))])
        super().__init__(
            name,
            *(*inside, str(python) or sys.executable, "-m", module, name, *arguments),
            folder=folder,
            environment={**os.environ, **(environment or {}), "PYTHONPATH": path},
        )
        self._ready = self.event("ready")

    def start(self) -> None:
        assert not self._ended, "a worker is started once"
        super().start()
        self._listener.start()

    def _popen(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            process_group=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    @property
    def address(self) -> str:
        """The address of its engine. Waits until it is known."""
        return str(self._ready.result(START_SECONDS)["address"])

    async def started(self) -> None:
        """Waits until it is ready."""
        await asyncio.wait_for(asyncio.wrap_future(self._ready), START_SECONDS)

    def tell(self, do: str, **arguments: Any) -> None:
        """Sends a command. Does nothing if the process has ended."""
        stdin = self._popened.stdin
        assert stdin is not None
        line = json.dumps({"do": do, **arguments}).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            if not stdin.closed:
                stdin.write(line)
                stdin.flush()

    def begin(self, do: str, **arguments: Any) -> Future[Event]:
        """Sends a command. Returns the future of its answer; of EOFError if the process ends
        before."""
        answer: Future[Event] = Future()
        with self._lock:
            if self._ended:
                answer.set_exception(self._gone())
                return answer
            ident = next(self._ids)
            self._answers[ident] = answer
        self.tell(do, id=ident, **arguments)
        return answer

    def ask(self, do: str, **arguments: Any) -> Event:
        """Sends a command, and returns its answer."""
        return self.begin(do, **arguments).result(PATIENCE)

    def event(self, *names: str) -> Future[Event]:
        """Returns the future of the next event with one of these names; of EOFError if the process
        ends before. Skips other events."""
        found: Future[Event] = Future()
        with self._lock:
            while self._events:
                event = self._events.pop(0)
                if event["event"] in names:
                    found.set_result(event)
                    return found
            if self._ended:
                found.set_exception(self._gone())
            else:
                self._waiting.append((names, found))
        return found

    async def said(self, *names: str) -> Event:
        """Does the same as event() for code with an event loop. Raises TimeoutError after 20 s, far
        longer than any step of a healthy worker."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.event(*names)), _HANGS_AFTER)
        except TimeoutError:
            reason = f"did not report {' or '.join(names)!r} in {_HANGS_AFTER:g} s"
            raise TimeoutError(str(self.failed(reason))) from None

    def close(self) -> None:
        super().close()
        if self._process is not None:
            self._listener.join()
            for pipe in (self._process.stdin, self._process.stdout):
                with self._lock, contextlib.suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()

    def _listen(self) -> None:
        assert self._popened.stdout is not None
        for line in self._popened.stdout:
            if not line.endswith(b"\n"):  # the process was killed
                break
            event: Event = json.loads(line)
            with self._lock:
                if "id" in event:
                    _settle(self._answers.pop(event.pop("id")), event)
                else:
                    self._hear(event)
        with self._lock:
            self._ended = True
            for future in (*self._answers.values(), *(one for _, one in self._waiting)):
                if future.set_running_or_notify_cancel():
                    future.set_exception(self._gone())

    def _hear(self, event: Event) -> None:
        self._waiting = [one for one in self._waiting if not one[1].cancelled()]
        if not self._waiting:
            self._events.append(event)
        for one in self._waiting:
            if event["event"] in one[0]:
                self._waiting.remove(one)
                _settle(one[1], event)
                return

    def _gone(self) -> EOFError:
        return EOFError(str(self.failed("has ended")))


def _settle(future: Future[Event], event: Event) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(event)
