"""Writes under way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence

from kvxfer.engine.arguments import require_callable
from kvxfer.engine.callback import tell
from kvxfer.engine.native import error_of, native


class Operation:
    """One submitted write operation.

    `await` it: it returns when every byte is delivered (placed in the receiver's memory), or
    raises an EngineError. Either way the source memory is no longer read. That also holds for a
    wait that is cancelled, for example by a timeout: it cancels the operation, and ends once the
    engine no longer reads the source. `await asyncio.shield(operation)` leaves the operation as it
    is.

    writes: writes on the wire (neighbouring pages are joined). immediates: the number by which the
        receiver's counter grows in all, known at once: one may count for several writes. nbytes:
        bytes of payload. error: the error, once it has failed.
    """

    __slots__ = (
        "_callbacks",
        "_done",
        "_engine",
        "_failed",
        "_waiters",
        "error",
        "id",
        "immediates",
        "nbytes",
        "writes",
    )

    def __init__(
        self,
        engine: native.TransferEngine,
        operation_id: int,
        writes: int,
        immediates: int,
        nbytes: int,
    ) -> None:
        self._engine = engine
        self.id = operation_id
        self.writes = writes
        self.immediates = immediates
        self.nbytes = nbytes
        self._done = False
        self._failed: Sequence[tuple[int, str, str]] = ()
        self.error: Exception | None = None
        self._callbacks: list[Callable[[], object]] = []
        # One per waiting task: a task that stops waiting affects neither the operation nor others.
        self._waiters: list[asyncio.Future[None]] = []

    def __await__(self) -> Generator[object, None, None]:
        yield from until_ended((self,))
        if self.error is not None:
            raise self.error

    def _until_ended(self) -> Generator[object, None, None]:
        if not self._done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            yield from waiter

    def on_end(self, callback: Callable[[], object]) -> None:
        """Calls back when it has ended, or now if it has. Event loop only."""
        require_callable("callback", callback)
        if self._done:
            tell(callback)
        else:
            self._callbacks.append(callback)

    def done(self) -> bool:
        """Whether it has ended, delivered or not."""
        return self._done

    def cancel(self) -> None:
        """Stops posting, and does not wait. The operation ends when its posted writes have: it then
        raises `Cancelled`, or returns if it was faster. A peer that takes none of the posted writes
        for its `peer_timeout` is disconnected, so that time is bounded. The source is free once the
        operation has ended. Any thread."""
        self._engine.cancel(self.id)

    def _finish(self, error: Exception | None, failed: Sequence[tuple[int, str, str]] = ()) -> None:
        """Takes the engine's report, on its event loop or before any caller has the operation.

        failed: the parts that failed: (part, code, text).
        """
        self.error = error
        self._failed = failed
        self._done = True
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
        for callback in self._callbacks:
            tell(callback)
        self._callbacks.clear()


def until_ended(operations: Sequence[Operation]) -> Generator[object, None, None]:
    """Waits until all have ended, successfully or not. If the wait is cancelled, cancels them and
    continues to wait, even if it is cancelled again: their sources are free when it has ended."""
    try:
        for operation in operations:
            yield from operation._until_ended()
    except asyncio.CancelledError:
        for operation in operations:
            operation.cancel()
        for operation in operations:
            while not operation.done():
                with contextlib.suppress(asyncio.CancelledError):
                    yield from operation._until_ended()
        raise


class Scattered(Operation):
    """One operation to several peers. Its error is that of the first peer whose part failed.

    by_peer: the number by which the counter of each peer grows.
    """

    __slots__ = ("by_peer",)

    def __init__(
        self,
        engine: native.TransferEngine,
        operation_id: int,
        writes: int,
        by_peer: Sequence[int],
        nbytes: int,
    ) -> None:
        super().__init__(engine, operation_id, writes, sum(by_peer), nbytes)
        self.by_peer = tuple(by_peer)

    @property
    def errors(self) -> tuple[Exception | None, ...]:
        """The error of each peer's part, once the operation has ended; None for one that did not
        fail."""
        errors: list[Exception | None] = [None] * len(self.by_peer)
        for part, code, text in self._failed:
            errors[part] = error_of(code, text)
        return tuple(errors)
