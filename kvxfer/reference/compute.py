"""The one thread in which a model runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from kvxfer.tracing.span import child

T = TypeVar("T")


class Abandoned(Exception):
    """The error inside a computation whose caller was cancelled."""


class Abandon:
    """A flag that ends a computation whose result is not needed any more. Any thread."""

    def __init__(self) -> None:
        self._flag = threading.Event()

    def set(self) -> None:
        self._flag.set()

    def check(self) -> None:
        """Raises `Abandoned` once set() was called."""
        if self._flag.is_set():
            raise Abandoned


class ComputeThread:
    """A thread that runs computations one after another, first come first served.

    One thread, because every computation already uses all the cores it may. A request with many
    steps queues each of them separately, so running requests take turns. run() belongs to the
    event loop.
    """

    def __init__(self, begin: Callable[[], object] = lambda: None) -> None:
        """`begin` is called once, in that thread, before the first computation."""
        self._under_way = 0
        self._executor = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="kvxfer-compute", initializer=begin
        )

    async def run(
        self, computation: Callable[[], T], abandon: Abandon | None = None, *, waits: str = ""
    ) -> T:
        """Returns the result of `computation`, which has the caller's context. While it waits for
        earlier ones, a traced request has a span named `waits`.

        If the waiting task is cancelled, a queued computation is dropped; for a running one,
        `abandon` is set, and its end is waited for. Once this has raised CancelledError nothing of
        it runs, so the blocks that it wrote to can be reused.
        """
        waiting = child(waits) if waits and self._under_way else None

        def begin() -> T:
            if waiting is not None:
                waiting.end()
            return computation()

        self._under_way += 1
        job = self._executor.submit(contextvars.copy_context().run, begin)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError as left:
            if waiting is not None:
                waiting.end(left)
            # Cancelling the wrapper has cancelled the job if it had not begun.
            if abandon is not None:
                abandon.set()
            await _ended(job)
            raise
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """Waits for the running computation; drops queued ones."""
        self._executor.shutdown(cancel_futures=True)


async def _ended(job: concurrent.futures.Future[T]) -> None:
    """Returns when `job` does not run any more, however often the task is cancelled meanwhile."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set_result, None))
    while not ended.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(ended)
