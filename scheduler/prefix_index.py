"""Which instances say that they have the KV blocks of a prompt's beginning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kvxfer.prefix_hashes import HASH_BYTES, MAX_HASHES_PER_INSTANCE, pack, unpack

# An update of more hashes than these is compared as a whole.
_FEW_HASHES: Final = 64
# A hash with more holders than these is not searched holder by holder.
_FEW: Final = 64
# How many instances are found by their blocks, beside those that are asked for by name.
_ENOUGH: Final = 16


class PrefixIndex:
    """Belongs to one event loop. Per instance the newest 1,024 hashes, about 100 bytes each."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        # Most hashes have one holder, who then needs no set.
        self._holders: dict[int, str | set[str]] = {}

    def publish(self, instance_id: str, added: bytes, removed: bytes, *, reset: bool) -> int:
        """Takes packed hashes in and out, all others out where `reset`; none of them twice.

        Returns how many it has.
        """
        before = self._packed.get(instance_id, b"")
        if not reset and len(added) + len(removed) <= _FEW_HASHES * HASH_BYTES:
            after = self._step(instance_id, before, added, removed)
        else:
            after = merged(before, added, removed, reset=reset)
            had, has = set(unpack(before)), set(unpack(after))
            for number in had - has:
                self._drop(number, instance_id)
            for number in has - had:
                self._add(number, instance_id)
        if after:
            self._packed[instance_id] = after
        else:
            self._packed.pop(instance_id, None)
        return len(after) // HASH_BYTES

    def _step(self, instance_id: str, packed: bytes, added: bytes, removed: bytes) -> bytes:
        """`merged`, and its holders, without a look at the hashes that stay."""
        for hashes, comes in ((removed, False), (added, True)):
            for start in range(0, len(hashes), HASH_BYTES):
                one = hashes[start : start + HASH_BYTES]
                at = _find(packed, one)
                if at >= 0:
                    packed = packed[:at] + packed[at + HASH_BYTES :]
                if comes and at < 0:
                    self._add(int.from_bytes(one, "big"), instance_id)
                elif at >= 0 and not comes:
                    self._drop(int.from_bytes(one, "big"), instance_id)
        packed += added
        surplus = max(0, len(packed) - MAX_HASHES_PER_INSTANCE * HASH_BYTES)
        for number in unpack(packed[:surplus]):
            self._drop(number, instance_id)
        return packed[surplus:]

    def remove(self, instance_id: str) -> None:
        """The instance is gone, or registered anew."""
        for number in unpack(self._packed.pop(instance_id, b"")):
            self._drop(number, instance_id)

    def longest(
        self,
        hashes: Sequence[int],
        *,
        asked: Sequence[str],
        least_loaded: Callable[[], Iterable[str]],
        takes_part: Callable[[str], bool],
    ) -> dict[str, int]:
        """For instances that have some of `hashes`, how far down the deepest one of them is.

        Chain hashes name all that is before them, so the deepest one counts, also where those
        before it were not published. All of `asked` are found, and about 16 others that
        `takes_part` is true of, those with the most first. Of a hash that more than 64 hold, only
        the ones among `least_loaded` are found.
        """
        found: dict[str, int] = {}
        waiting, passed = set(asked), set[str]()
        others, sifted = 0, False
        for depth in range(len(hashes), 0, -1):
            holders = self._holders.get(hashes[depth - 1])
            if holders is None:
                continue
            if isinstance(holders, str):
                holders = {holders}
            for name in [name for name in waiting if name in holders]:
                waiting.remove(name)
                found[name] = depth
            if others < _ENOUGH:
                new: Iterable[str] = ()
                if len(holders) <= _FEW:
                    new = [name for name in holders if name not in found and name not in passed]
                elif not sifted:
                    sifted = True
                    among = (n for n in least_loaded() if n in holders and n not in found)
                    new = list(islice(among, _ENOUGH))
                for name in new:
                    if takes_part(name):
                        found[name] = depth
                        others += 1
                    else:
                        passed.add(name)
            elif not waiting:
                break
        return found

    def _add(self, number: int, instance_id: str) -> None:
        holders = self._holders.setdefault(number, instance_id)
        if isinstance(holders, set):
            holders.add(instance_id)
        elif holders != instance_id:
            self._holders[number] = {holders, instance_id}

    def _drop(self, number: int, instance_id: str) -> None:
        holders = self._holders[number]
        if isinstance(holders, str):
            del self._holders[number]
            return
        holders.remove(instance_id)
        if len(holders) == 1:
            self._holders[number] = holders.pop()


def _find(packed: bytes, one: bytes) -> int:
    """Where a hash begins among others; -1 where it is not there."""
    at = packed.find(one)
    while at % HASH_BYTES and at >= 0:
        at = packed.find(one, at + 1)
    return at


def merged(held: bytes, added: bytes, removed: bytes, *, reset: bool) -> bytes:
    """The packed hashes after a step, the newest last; blocks.lua in Redis does the same."""
    kept = {} if reset else dict.fromkeys(unpack(held))
    new = unpack(added)
    for number in (*unpack(removed), *new):
        kept.pop(number, None)
    kept.update(dict.fromkeys(new))
    return pack(kept)[-MAX_HASHES_PER_INSTANCE * HASH_BYTES :]
