"""A limit for each of many short waits, at the price of one timer for all of them."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class WaitLimit:
    """A block that raises TimeoutError if a wait in it lasts longer than `seconds`; None sets no
    limit. A wait lasts from begin() to end(), one at a time.

    `asyncio.timeout` around each wait would set and cancel a timer every time.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._block = asyncio.timeout(None)
        await self._block.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._block.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        """Whether this limit ended the block."""
        return self._block.expired()

    def begin(self) -> None:
        self._since = self._loop.time()
        if self._timer is None and self._seconds is not None:
            self._timer = self._loop.call_at(self._since + self._seconds, self._look)

    def end(self) -> float:
        """Ends the wait; returns the seconds that it took."""
        since, self._since = self._since, None
        return 0.0 if since is None else self._loop.time() - since

    def _look(self) -> None:
        self._timer = None
        if self._since is None or self._seconds is None:
            return  # the next wait sets it again
        due = self._since + self._seconds
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._block.reschedule(self._loop.time())
