"""Words that compute counts up, to start transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvxfer.engine.native import native
from kvxfer.errors import InvalidArgument


class WatchFor(NamedTuple):
    """What a write waits for: that the word is at `value` or above it. `Watcher.at()` makes it; it
    keeps the word alive."""

    word: native.WatchWord
    value: int


class Watcher:
    """A 64-bit word of host memory, at zero, that compute adds to.

    A write submitted with `after=watcher.at(n)` is checked and queued at once, and starts when
    the word has reached n: layer n of a transfer is submitted beforehand and leaves as soon as
    its kernel has counted. Its deadline runs from submission. add() starts it at once. After
    count(), or a plain store of native or GPU code to `address`, it starts within 100 µs, or within
    a sixteenth of the time that the engine has moved nothing for where that is longer, 1 ms at
    most. One engine thread, the one that moves the bytes, serves all watchers of an engine.

    Keep the watcher for as long as anybody adds to `address`. Any thread.
    """

    __slots__ = ("_engine", "_word", "count")

    count: Callable[[int], int]
    """Adds without a call that wakes the engine. Returns the new value."""

    def __init__(self, engine: native.TransferEngine) -> None:
        self._engine = engine
        self._word = native.WatchWord()
        self.count = self._word.add

    @property
    def address(self) -> int:
        """Of the word: 8 bytes, aligned, in this process. Add to it atomically."""
        return self._word.address

    @property
    def value(self) -> int:
        """What the word has been counted up to."""
        return self._word.value

    def add(self, by: int = 1) -> int:
        """Adds, and starts what waited for that. Returns the new value."""
        value = self._word.add(by)
        self._engine.wake()
        return value

    def at(self, value: int) -> WatchFor:
        """For the `after` of a write."""
        if not 0 <= value < 1 << 64:
            raise InvalidArgument(f"a watcher never reaches {value}; it counts from 0 to 2**64 - 1")
        return WatchFor(self._word, value)

    def __repr__(self) -> str:
        return f"Watcher(address={self.address:#x}, value={self.value})"
