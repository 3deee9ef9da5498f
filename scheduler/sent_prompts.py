"""Prompts on their way to instances that will cache them, but have not reported so yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

# The most hashes that are kept, of the newest prompts.
_MOST_HASHES: Final = 1 << 16
# The first heartbeat after a transfer's end may come with blocks published before it.
_HEARTBEATS: Final = 2


@dataclass(frozen=True, slots=True)
class _Prompt:
    instances: frozenset[str]
    hashes: tuple[int, ...]


class SentPrompts:
    """The prompts of transfers that were opened here, in one event loop.

    A prompt counts as cached at both its instances while its transfer is open, and until each has
    sent two heartbeats after that.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._hashes = 0
        self._holders: dict[int, Counter[str]] = {}
        # Instance -> its transfers, each with the heartbeats that are left; None while it is open.
        self._of: dict[str, dict[str, int | None]] = {}

    def open(self, transfer_id: str, instances: Iterable[str], hashes: tuple[int, ...]) -> None:
        if transfer_id in self._prompts:  # an earlier transfer had this id
            self._forget(transfer_id)
        prompt = _Prompt(frozenset(instances), hashes)
        self._prompts[transfer_id] = prompt
        self._hashes += len(hashes)
        for name in prompt.instances:
            self._of.setdefault(name, {})[transfer_id] = None
            for number in hashes:
                self._holders.setdefault(number, Counter())[name] += 1
        while self._hashes > _MOST_HASHES:
            self._forget(next(iter(self._prompts)))

    def end(self, transfer_id: str) -> None:
        prompt = self._prompts.get(transfer_id)
        for name in () if prompt is None else prompt.instances:
            if transfer_id in self._of.get(name, ()):
                self._of[name][transfer_id] = _HEARTBEATS

    def beat(self, instance_id: str) -> None:
        """Counts a heartbeat of the instance."""
        of = self._of.get(instance_id)
        if of is None:
            return
        for transfer_id, left in list(of.items()):
            if left == 1:
                self._drop(transfer_id, instance_id)
            elif left is not None:
                of[transfer_id] = left - 1

    def remove(self, instance_id: str) -> None:
        """Forgets an instance that is gone or registers again."""
        for transfer_id in list(self._of.get(instance_id, ())):
            self._drop(transfer_id, instance_id)

    def holders(self, number: int) -> Collection[str]:
        """Returns the instances that a prompt with this hash was sent to."""
        return self._holders.get(number, ())

    def _forget(self, transfer_id: str) -> None:
        for name in self._prompts[transfer_id].instances:
            if transfer_id in self._of.get(name, ()):
                self._drop(transfer_id, name)

    def _drop(self, transfer_id: str, name: str) -> None:
        prompt = self._prompts[transfer_id]
        del self._of[name][transfer_id]
        if not self._of[name]:
            del self._of[name]
        for number in prompt.hashes:
            holders = self._holders[number]
            holders[name] -= 1
            if not holders[name]:
                del holders[name]
                if not holders:
                    del self._holders[number]
        if not any(transfer_id in self._of.get(each, ()) for each in prompt.instances):
            del self._prompts[transfer_id]
            self._hashes -= len(prompt.hashes)
