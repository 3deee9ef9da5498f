"""Writes on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from kvxfer.engine.native import native


class Operation:
    """One submitted write operation.

    `await` it: it returns when every byte is delivered (placed in the receiver's memory), or
    raises an EngineError. Either way the source memory is no longer read.

    writes: what the receiver's counter grows by in all, known at once (neighbouring pages have
        been joined). nbytes: payload.
    """

    __slots__ = ("_done", "_engine", "_error", "_waiters", "id", "nbytes", "writes")

    def __init__(
        self, engine: native.TransferEngine, operation_id: int, writes: int, nbytes: int
    ) -> None:
        self._engine = engine
        self.id = operation_id
        self.writes = writes
        self.nbytes = nbytes
        self._done = False
        self._error: Exception | None = None
        # One per waiting task: one that stops waiting disturbs neither the operation nor others.
        self._waiters: list[asyncio.Future[None]] = []

    def __await__(self) -> Generator[object, None, None]:
        if not self._done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            yield from waiter
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._done

    def cancel(self) -> None:
        """Stops posting; what is posted is waited for. The operation then raises `Cancelled`, or
        returns if it was faster. Any thread."""
        self._engine.cancel(self.id)

    def finish(self, error: Exception | None) -> None:
        """The engine's report: on its event loop, or before anybody has the operation."""
        self._error = error
        self._done = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
