"""What a worker has in its prefix cache, and what of that the control plane does not know yet."""

from __future__ import annotations

from collections.abc import Iterable

from kvxfer.instances import BlockUpdate
from kvxfer.prefix_hashes import MAX_HASHES_PER_INSTANCE


class CachedBlocks:
    """The newest 1,024 hashes (kvxfer.prefix_hashes). Belongs to one event loop.

    The engine calls `add` and `remove`; `Registration` publishes with each heartbeat.
    """

    def __init__(self) -> None:
        self._held: dict[int, None] = {}
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        # The registration that the changes above follow; 0 where all has to be told.
        self._epoch = 0

    def add(self, hashes: Iterable[int]) -> None:
        """Blocks are in the cache, or were used again: they are the newest now."""
        for number in hashes:
            for known in (self._held, self._added):
                known.pop(number, None)
                known[number] = None
                if len(known) > MAX_HASHES_PER_INSTANCE:
                    del known[next(iter(known))]
            self._removed.pop(number, None)

    def remove(self, hashes: Iterable[int]) -> None:
        """Blocks were evicted."""
        for number in hashes:
            self._held.pop(number, None)
            self._added.pop(number, None)
            self._removed[number] = None
        if len(self._removed) > MAX_HASHES_PER_INSTANCE:
            self._removed.clear()
            self.lost()

    def clear(self) -> None:
        """Nothing is in the cache any more."""
        self._held.clear()
        self._added.clear()
        self.lost()

    def take(self, epoch: int) -> BlockUpdate | None:
        """What to publish under this epoch; None where nothing changed. Call `lost` if it fails."""
        if epoch != self._epoch:
            update = BlockUpdate(added=tuple(self._held), reset=True)
        elif self._added or self._removed:
            update = BlockUpdate(added=tuple(self._added), removed=tuple(self._removed))
        else:
            return None
        self._added.clear()
        self._removed.clear()
        self._epoch = epoch
        return update

    def lost(self) -> None:
        """The last update may be lost, so the next one has everything."""
        self._epoch = 0
