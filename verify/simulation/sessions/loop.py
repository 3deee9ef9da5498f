"""An asyncio event loop that never waits: its driver decides when it runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any


class _NoSelector:
    """A selector that never selects: SimulatedLoop.readable() reports readiness."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class SimulatedLoop(asyncio.BaseEventLoop):
    """The loop of one simulated process. Its callbacks run in asyncio's order. A loop that is not
    driven is a stopped or dead process."""

    def __init__(self, clock: Callable[[], float], work_seconds: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._work_seconds = work_seconds
        self._selector = _NoSelector()
        self._readers: dict[int, Callable[[], object]] = {}
        self.problems: list[str] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def time(self) -> float:
        return self._clock()

    def run_due(self) -> None:
        """Runs one turn: the callbacks that were due at its begin."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]
        finally:
            asyncio._set_running_loop(None)

    def due_at(self) -> float:
        """Returns the time of the next callback: 0 for now, infinity if none is planned."""
        if self._ready:  # type: ignore[attr-defined]
            return 0.0
        scheduled = self._scheduled  # type: ignore[attr-defined]
        return scheduled[0]._when if scheduled else math.inf

    def create_task(self, coro: Any, **named: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(coro, **named)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that are not done, in the order in which they were made."""
        return [task for task in self._tasks if not task.done()]

    def readable(self, fd: int) -> None:
        """Reports that `fd` has data to read."""
        if fd in self._readers:
            self.call_soon(self._readers[fd])

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self._readers[fd] = callback

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Runs a thread's work in one step, after a simulated delay."""
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.call_later(self._work_seconds(), work)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
