"""Bodies that contain all valid pairs of members: those that the engine accepts, alone or among
other members."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Sequence
from typing import Final

Pair = tuple[str, str]

_MEMBERS: Final = 9


class PairCover:
    """The pairs that were answered, were refused, and are left. The engine's answers decide: a pair
    is invalid if its body of two members is refused."""

    def __init__(self, members: Sequence[str], rng: random.Random) -> None:
        """Covers pairs of `members`, whose ordinary values are accepted alone."""
        self._members = sorted(members)
        self._rng = rng
        self.left: set[Pair] = set(itertools.combinations(self._members, 2))
        self.total = len(self.left)
        self.answered: set[Pair] = set()
        self.refused: set[Pair] = set()
        self._suspected: set[Pair] = set()
        """The pairs in refused bodies of more members. Each is tried alone."""

    def next(self) -> Collection[str]:
        """Returns the members of the next body. A pair has to be left."""
        fresh = sorted(self.left - self._suspected)
        if not fresh:
            return self._rng.choice(sorted(self.left))
        chosen = list(self._rng.choice(fresh))
        others = [name for name in self._members if name not in chosen]
        self._rng.shuffle(others)
        for name in sorted(others, key=lambda name: -self._gain(name, chosen)):
            pairs = {_pair(name, each) for each in chosen}
            if len(chosen) < _MEMBERS and not pairs & (self.refused | self._suspected):
                chosen.append(name)
        return chosen

    def _gain(self, name: str, chosen: Sequence[str]) -> int:
        return sum(_pair(name, each) in self.left for each in chosen)

    def told(self, names: Collection[str], *, answered: bool) -> None:
        """Takes the engine's answer to a body with these members."""
        pairs = set(itertools.combinations(sorted(names), 2))
        if answered:
            self.answered |= pairs & self.left
            self.left -= pairs
        elif len(names) == 2:
            self.refused |= pairs & self.left
            self.left -= pairs
        else:
            self._suspected |= pairs & self.left


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)
