"""Writes on their way."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator

from kvxfer.engine.native import native


class Operation:
    """One submitted write operation.

    `await` it: it returns when every byte is delivered (placed in the receiver's memory), or
    raises an EngineError. Either way the source memory is no longer read.

    writes: what the receiver's counter grows by in all, known at once (neighbouring pages have
        been joined). nbytes: payload.
    """

    __slots__ = ("_engine", "_future", "id", "nbytes", "writes")

    def __init__(
        self, engine: native.TransferEngine, operation_id: int, writes: int, nbytes: int
    ) -> None:
        self._engine = engine
        self.id = operation_id
        self.writes = writes
        self.nbytes = nbytes
        # Not asyncio's: operations are submitted from any thread.
        self._future: concurrent.futures.Future[None] = concurrent.futures.Future()

    def __await__(self) -> Generator[object, None, None]:
        # Shielded: a task that stops waiting must not make the outcome unknowable to others.
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def done(self) -> bool:
        return self._future.done()

    def cancel(self) -> None:
        """Stops posting; what is posted is waited for. The operation then raises `Cancelled`, or
        returns if it was faster. Any thread."""
        self._engine.cancel(self.id)

    def finish(self, error: Exception | None) -> None:
        """The engine's report."""
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
