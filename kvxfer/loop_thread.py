"""A thread with an event loop, for programs that call it from threads without one."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from kvxfer.errors import DeadlineExceeded, EngineClosed

logger = logging.getLogger(__name__)

T = TypeVar("T")

START_SECONDS: Final = 60.0
_CLOSE_SECONDS: Final = 10.0
_ASK_SECONDS: Final = 1.0


class LoopThread(abc.ABC):
    """A thread that runs _serve() on its own event loop from begin() to close(). Any thread may
    call it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._awaited: list[concurrent.futures.Future[None]] = [self._started]
        self._closing = asyncio.Event()
        self._ended = threading.Event()
        self._looked_at = self._asked_at = -math.inf
        self._asked_since: float | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._main, name="kvxfer-loop", daemon=True)
        self._process = os.getpid()

    @abc.abstractmethod
    async def _serve(self) -> None:
        """Sets `_started` when everything is ready, and ends when `_closing` is set."""

    def begin(self) -> None:
        """Returns when _serve() has started. Raises the error that prevents that, or
        DeadlineExceeded; the thread has then been closed."""
        self._thread.start()
        try:
            self._started.result(START_SECONDS)
        except BaseException as error:
            self.close()
            if isinstance(error, concurrent.futures.TimeoutError) and not self._started.done():
                raise DeadlineExceeded(
                    f"{type(self).__name__} has not started within {START_SECONDS:g} s"
                ) from None
            raise

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, and with it everything of _serve()."""
        return self._ended.is_set()

    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Returns the result of a coroutine on the loop. Raises TimeoutError after `seconds`, and
        EngineClosed if the thread has ended or in a forked process, which does not have it."""
        self._require_own_process(work)
        try:
            running = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise EngineClosed("the transfer engine of this process has ended") from error
        try:
            return running.result(seconds)
        except concurrent.futures.CancelledError as error:
            raise EngineClosed("the transfer engine of this process has ended") from error

    def answers(self, seconds: float, now: float) -> bool:
        """Returns False once the loop has done nothing for `seconds`, and in a forked process. One
        thread asks often. After more than a second between its calls the time starts again, as the
        whole process may not have run."""
        if os.getpid() != self._process:
            return False
        paused, self._looked_at = now - self._looked_at > _ASK_SECONDS, now
        if self._asked_since is None:
            if now - self._asked_at >= _ASK_SECONDS:
                self._asked_at = self._asked_since = now
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._answer)
            return True
        if paused:
            self._asked_since = now
        return now - self._asked_since < seconds

    def _answer(self) -> None:
        self._asked_since = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a coroutine on the loop; it reports its end itself. Raises EngineClosed as run()
        does."""
        self._require_own_process(work)
        try:
            self._loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError as error:
            work.close()
            raise EngineClosed("the transfer engine of this process has ended") from error

    def _require_own_process(self, work: Coroutine[Any, Any, Any]) -> None:
        """Raises EngineClosed in a forked process, which shares the descriptors of its parent's
        loop and would wake it."""
        if os.getpid() != self._process:
            work.close()
            raise EngineClosed(
                f"the {type(self).__name__} belongs to process {self._process}, from which this "
                "one was forked; make one here"
            )

    def close(self) -> None:
        """Ends _serve(). May be called any number of times; does nothing in a forked process."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(_CLOSE_SECONDS)

    def _stop(self) -> None:
        self._closing.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            awaited = [future for future in self._awaited if not future.done()]
            if not awaited:
                logger.exception("the transfer engine of this process has ended")
            for future in awaited:
                future.set_exception(error)
        finally:
            self._ended.set()
