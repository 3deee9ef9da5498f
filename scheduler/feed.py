"""The last changes of the fleet, kept so that a watcher can resume where it was cut off."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable
from itertools import islice

from kvxfer.instances import Change


class ChangeFeed:
    """A bounded log of changes with ascending ids. Belongs to one event loop."""

    def __init__(self, *, last_id: int, capacity: int) -> None:
        self._changes: deque[Change] = deque(maxlen=capacity)
        self._floor = last_id
        self._news = asyncio.Event()
        self._closed = False

    @property
    def last_id(self) -> int:
        return self._changes[-1].id if self._changes else self._floor

    @property
    def closed(self) -> bool:
        return self._closed

    def append(self, change: Change) -> None:
        """Adds a change whose id is greater than `last_id`."""
        if len(self._changes) == self._changes.maxlen:
            self._floor = self._changes[0].id
        self._changes.append(change)
        self._wake()

    def reload(self, floor: int, changes: Iterable[Change]) -> None:
        """Replaces everything: `floor` is the id of the change before the first of `changes`."""
        self._changes.clear()
        self._floor = floor
        self._changes.extend(changes)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def covers(self, position: int) -> bool:
        """Whether `position` is the id of a change all of whose successors are still here."""
        if position == self._floor:
            return True
        at = bisect_left(self._changes, position, key=_id)
        return at < len(self._changes) and self._changes[at].id == position

    def after(self, position: int, *, limit: int) -> list[Change]:
        """Returns the first `limit` changes after a position that the feed covers."""
        first = bisect_right(self._changes, position, key=_id)
        return list(islice(self._changes, first, first + limit))

    async def wait(self, position: int) -> None:
        """Returns once `position` is not the end of the feed, or the feed is closed."""
        while self.last_id == position and not self._closed:
            await self._news.wait()

    def _wake(self) -> None:
        # Each change has its own event: a waiter that is woken never has to clear it for others.
        self._news.set()
        self._news = asyncio.Event()


def _id(change: Change) -> int:
    return change.id
