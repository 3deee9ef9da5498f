"""The last changes of the fleet, kept so that a watcher can go on where it was cut off."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import islice

from kvxfer.instances import Change


class ChangeFeed:
    """A bounded log of changes with consecutive ids. Belongs to one event loop."""

    def __init__(self, *, last_id: int, capacity: int) -> None:
        self._changes: deque[Change] = deque(maxlen=capacity)
        self._last_id = last_id
        self._news = asyncio.Event()
        self._closed = False

    @property
    def last_id(self) -> int:
        return self._last_id

    @property
    def next_id(self) -> int:
        return self._last_id + 1

    @property
    def closed(self) -> bool:
        return self._closed

    def append(self, change: Change) -> None:
        """Adds the change with `next_id`."""
        self._changes.append(change)
        self._last_id = change.id
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def covers(self, position: int) -> bool:
        """Whether every change after `position` is still here."""
        return self._last_id - len(self._changes) <= position <= self._last_id

    def after(self, position: int, *, limit: int) -> list[Change]:
        """The first `limit` changes after a position that the feed covers."""
        first = len(self._changes) - (self._last_id - position)
        return list(islice(self._changes, first, first + limit))

    async def wait(self, position: int) -> None:
        """Returns once there is a change after `position`, or the feed is closed."""
        while self._last_id == position and not self._closed:
            await self._news.wait()

    def _wake(self) -> None:
        # Each change has its own event: a waiter that is woken never has to clear it for others.
        self._news.set()
        self._news = asyncio.Event()
