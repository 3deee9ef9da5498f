"""Virtual time for tests: an event loop on which seconds pass at once, when nothing else is to do.

Every unmarked asynchronous test runs on a `VirtualLoop` (tests/conftest.py). Deadlines of seconds
take no time there, and a busy machine cannot miss one.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

from anyio import to_thread

from kvxfer.clock import SYSTEM_CLOCK, Clock

_MONOTONIC_BEGIN = 1000.0
_UNIX_BEGIN = 1_800_000_000.0
_LONGEST_WAIT: Final = 86_400.0


class VirtualClock:
    """A `kvxfer.clock.Clock` that passes only when it is told to."""

    def __init__(self, unix: float = _UNIX_BEGIN) -> None:
        self._unix = unix
        self._passed = 0.0

    def monotonic(self) -> float:
        return _MONOTONIC_BEGIN + self._passed

    def unix(self) -> float:
        return self._unix + self._passed

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Moves time on while nothing runs, as for a process that was stopped."""
        self._passed += seconds


class NothingLeftToDo(RuntimeError):
    """An error: the test waits for something that can never happen."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that moves `clock` to the next timer when nothing is ready, instead of waiting.

    Work in threads (`asyncio.to_thread`, anyio's) takes no virtual time: the clock stands still
    until it is done. A socket's time is real, so a virtual test may not open one.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self.threads_at_work = 0
        self.waited = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.clock.monotonic()

    def run_forever(self) -> None:
        run_sync = to_thread.run_sync

        async def counted(*work: Any, **options: Any) -> Any:
            with self._thread_at_work():
                return await run_sync(*work, **options)

        with mock.patch.object(to_thread, "run_sync", counted):
            super().run_forever()

    async def shutdown_default_executor(self, *args: Any) -> None:
        with self._thread_at_work():
            await super().shutdown_default_executor(*args)

    @contextmanager
    def _thread_at_work(self) -> Iterator[None]:
        self.threads_at_work += 1
        try:
            yield
        finally:
            self.threads_at_work -= 1

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        work = super().run_in_executor(executor, func, *args)
        self.threads_at_work += 1
        work.add_done_callback(self._work_done)
        return work

    def _work_done(self, _: object) -> None:
        self.threads_at_work -= 1


def loop_clock() -> Clock:
    """Returns the clock of the running loop, virtual or real."""
    loop = asyncio.get_running_loop()
    return loop.clock if isinstance(loop, VirtualLoop) else SYSTEM_CLOCK


class _Selector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # The loop registers one socket itself, so that threads can wake it.
        assert not self.get_map(), "a virtual test opens no socket: mark it native or realtime"
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.threads_at_work:
            return super().select(None)
        if timeout is None:
            raise NothingLeftToDo("every task waits, and no timer is set")
        self._loop.clock.advance(timeout)
        self._loop.waited += timeout
        if self._loop.waited > _LONGEST_WAIT:
            raise NothingLeftToDo("a day has passed, and only repeating timers still run")
        return super().select(0)


async def passes(seconds: float) -> None:
    """Lets `seconds` pass, and does everything that becomes due."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "only virtual time passes at once"
    await asyncio.sleep(seconds)
