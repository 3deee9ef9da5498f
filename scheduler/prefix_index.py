"""The index of the KV blocks that instances report to have of a prompt's beginning."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from kvxfer.prefix_hashes import KEPT_BITS, MAX_HASHES_PER_INSTANCE, unpack
from kvxfer.scheduler.sent_prompts import SentPrompts

# An entry has the bits of a hash that its shard does not imply, and the number of an instance.
_SHARD_BITS: Final = 12
_WITHIN: Final = KEPT_BITS - _SHARD_BITS
_NUMBER_BITS: Final = 64 - _WITHIN
_NUMBER: Final = (1 << _NUMBER_BITS) - 1
_ENTRY: Final = (1 << 64) - 1
_KEPT: Final = (1 << KEPT_BITS) - 1
# Entries that each update checks for instances that are gone.
_SWEPT: Final = 1024
# A hash with more holders than these is not searched holder by holder.
_FEW: Final = 64
# Instances that are found by their blocks, beside those that are asked for by name.
_ENOUGH: Final = 16


class Level(NamedTuple):
    """A hash of a prompt that some instances have: its depth, their entries, and the instances that
    are about to have it."""

    depth: int
    shard: array[int]
    first: int
    last: int
    sent: Collection[str]

    @property
    def entries(self) -> int:
        return self.last - self.first + len(self.sent)

    def numbers(self) -> Iterator[int]:
        return (entry & _NUMBER for entry in self.shard[self.first : self.last])

    def has(self, number: int) -> bool:
        if self.first == self.last:
            return False
        entry = self.shard[self.first] & ~_NUMBER | number
        at = bisect_left(self.shard, entry, self.first, self.last)
        return at < self.last and self.shard[at] == entry


class PrefixIndex:
    """An index of hashes, in one event loop.

    It has sorted arrays, which take 8 bytes for each hash of each instance, and a sixteenth more as
    spare. The hashes of a removed instance are no longer found; each update takes out a portion of
    them.
    """

    def __init__(self) -> None:
        self._shards = [array("Q") for _ in range(1 << _SHARD_BITS)]
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._held: dict[str, int] = {}
        self._last = 0
        # Numbers of removed instances, those that the current pass takes out, and the shards that
        # it has seen.
        self._gone: set[int] = set()
        self._leaving: frozenset[int] = frozenset()
        self._seen = 0

    def publish(self, instance_id: str, added: bytes, removed: bytes, *, reset: bool) -> int:
        """Adds and removes packed hashes; `reset` first removes all others.

        If more than MAX_HASHES_PER_INSTANCE would be kept, forgets the earlier ones. Returns the
        number of hashes that the instance has.
        """
        self._sweep()
        if reset:
            self.remove(instance_id)
        number = self._number(instance_id)
        held = self._held.get(instance_id, 0)
        for word in unpack(removed):
            held -= self._take_out(word, number)
        for word in unpack(added):
            held += self._put_in(word, number)
        if held > MAX_HASHES_PER_INSTANCE:
            return self.publish(instance_id, added, b"", reset=True)
        self._held[instance_id] = held
        return held

    def remove(self, instance_id: str) -> None:
        """Forgets an instance that is gone or registers again."""
        number = self._numbers.pop(instance_id, None)
        if number is not None:
            del self._names[number], self._held[instance_id]
            self._gone.add(number)

    def knows(self, instance_id: str) -> bool:
        """Whether the instance has published, even if it has nothing."""
        return instance_id in self._numbers

    def levels(self, hashes: Sequence[int], sent: SentPrompts) -> list[Level]:
        """Returns the hashes of a prompt that instances have or will have, the deepest first. The
        result is valid until an update."""
        found = []
        for depth in range(len(hashes), 0, -1):
            word = hashes[depth - 1] & _KEPT
            shard = self._shards[word >> _WITHIN]
            entry = (word << _NUMBER_BITS) & _ENTRY
            first = last = bisect_left(shard, entry)
            if first < len(shard) and shard[first] <= entry | _NUMBER:
                last = bisect_left(shard, entry + _NUMBER + 1, first)
            soon = sent.holders(hashes[depth - 1])
            if first < last or soon:
                found.append(Level(depth, shard, first, last, soon))
        return found

    def holders(self, level: Level) -> set[str]:
        """Returns all instances that have the hash of `level`, or will have it."""
        names = {self._names.get(number) for number in level.numbers()}
        return {name for name in names if name is not None}.union(level.sent)

    def longest(
        self,
        levels: Iterable[Level],
        *,
        asked: Collection[str],
        least_loaded: Callable[[], Iterable[str]],
        takes_part: Callable[[str], bool],
    ) -> dict[str, int]:
        """Returns the depth of the deepest of these hashes that each instance has.

        A chain hash covers all blocks before it, so the deepest one counts even if those before it
        were not published. Finds all of `asked`, and about 16 others for which `takes_part` is
        true, those with the most first. If more than 64 instances have a hash, finds only those
        among `asked` and `least_loaded`.
        """
        found: dict[str, int] = {}
        waiting, passed = dict.fromkeys(asked), set[str]()
        others, sifted = 0, False
        for level in levels:
            few = level.entries <= _FEW
            holders = self.holders(level) if few else set()
            for name in [n for n in waiting if (n in holders if few else self._has(level, n))]:
                del waiting[name]
                found[name] = level.depth
            if others < _ENOUGH:
                new: Iterable[str] = ()
                if few:
                    new = [name for name in holders if name not in found and name not in passed]
                elif not sifted:
                    sifted = True
                    among = (n for n in least_loaded() if n not in found and self._has(level, n))
                    new = list(islice(among, _ENOUGH))
                for name in new:
                    if takes_part(name):
                        found[name] = level.depth
                        others += 1
                    else:
                        passed.add(name)
            elif not waiting:
                break
        return found

    def _has(self, level: Level, name: str) -> bool:
        number = self._numbers.get(name)
        return name in level.sent or (number is not None and level.has(number))

    def _put_in(self, word: int, number: int) -> int:
        """Returns the number of entries added, 0 or 1."""
        shard, entry = self._place(word, number)
        at = bisect_left(shard, entry)
        if at < len(shard) and shard[at] == entry:
            return 0
        shard.insert(at, entry)
        return 1

    def _take_out(self, word: int, number: int) -> int:
        """Returns the number of entries removed, 0 or 1."""
        shard, entry = self._place(word, number)
        at = bisect_left(shard, entry)
        if at == len(shard) or shard[at] != entry:
            return 0
        del shard[at]
        return 1

    def _place(self, word: int, number: int) -> tuple[array[int], int]:
        entry = (word << _NUMBER_BITS) & _ENTRY | number
        return self._shards[word >> _WITHIN], entry

    def _number(self, instance_id: str) -> int:
        number = self._numbers.get(instance_id)
        if number is None:
            number = self._last = self._last + 1
            self._numbers[instance_id] = number
            self._names[number] = instance_id
        return number

    def _sweep(self) -> None:
        """Continues the pass that takes out the hashes of instances that are gone."""
        looked_at = 0
        while self._gone and looked_at < _SWEPT:
            if self._seen == 0:
                self._leaving = frozenset(self._gone)
            shard = self._shards[self._seen]
            if any(entry & _NUMBER in self._leaving for entry in shard):
                kept = (entry for entry in shard if entry & _NUMBER not in self._leaving)
                self._shards[self._seen] = array("Q", kept)
            looked_at += 1 + len(shard)
            self._seen += 1
            if self._seen == len(self._shards):
                self._seen = 0
                self._gone -= self._leaving
