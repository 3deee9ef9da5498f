"""The contents of a worker's prefix cache, and their changes to publish to the control plane."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Final

from kvxfer.instances import BlockUpdate
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE, MAX_HASHES_PER_UPDATE

# Every control plane keeps at least this many, also one that has not reported its capacity.
_LEAST: Final = 1024


class CachedBlocks:
    """The newest hashes (kvxfer.prefix_hashes), at most `limit`, and no more than the control plane
    keeps. Belongs to one event loop.

    The engine calls `add` and `remove`; `Registration` publishes with each heartbeat.
    """

    def __init__(self, limit: int = MAX_HASHES_PER_INSTANCE) -> None:
        self.limit = limit
        self._kept = _LEAST
        self._held: dict[int, None] = {}
        # Unpublished changes: only held hashes are added, and only published ones removed.
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        # The registration that the changes above follow; 0 if all hashes have to be published.
        self._epoch = 0

    def add(self, hashes: Iterable[int]) -> None:
        """Adds blocks that are in the cache, or were used again: they are the newest now."""
        for number in hashes:
            if number in self._held:
                del self._held[number]
            elif number in self._removed:
                del self._removed[number]
            else:
                self._added[number] = None
            self._held[number] = None
        self._trim()

    def remove(self, hashes: Iterable[int]) -> None:
        """Removes blocks that were evicted."""
        for number in hashes:
            if number in self._held:
                self._drop(number)

    def clear(self) -> None:
        """Removes all blocks."""
        self._held.clear()
        self.lost()

    def take(self, epoch: int) -> BlockUpdate | None:
        """Returns what to publish under this epoch; None if nothing changed. Call `lost` if
        publishing fails.

        An update adds and removes at most 1,024 hashes each. The newest are added first, the rest
        by later updates.
        """
        reset = epoch != self._epoch
        if reset:
            self._epoch = epoch
            self._added = dict(self._held)
            self._removed.clear()
        elif not self._added and not self._removed:
            return None
        newest = tuple(islice(reversed(self._added), MAX_HASHES_PER_UPDATE))[::-1]
        gone = tuple(islice(self._removed, MAX_HASHES_PER_UPDATE))
        for number in newest:
            del self._added[number]
        for number in gone:
            del self._removed[number]
        return BlockUpdate(added=newest, removed=gone, reset=reset)

    def lost(self) -> None:
        """Makes the next update contain all hashes, as the last one may be lost."""
        self._epoch = 0

    def kept(self, capacity: int) -> None:
        """Limits the hashes to `capacity`, the number that the control plane keeps."""
        self._kept = capacity
        self._trim()

    def _trim(self) -> None:
        while len(self._held) > min(self.limit, self._kept):
            self._drop(next(iter(self._held)))

    def _drop(self, number: int) -> None:
        del self._held[number]
        if number in self._added:
            del self._added[number]
        else:
            self._removed[number] = None
