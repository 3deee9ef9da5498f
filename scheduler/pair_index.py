"""The ready instances sorted by load and place, so that a pair is found without a look at all."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeAlias

from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.scheduler.pairing import (
    SIDES,
    InstanceLoad,
    Kind,
    Pair,
    available_blocks,
    blocks_for,
    fabric_steps,
    instance_load,
    kind_of,
    mismatch_of,
    refusal,
)
from kvxfer.scheduler.topology import LABELS, Place, distance, place_of
from kvxfer.transfers import TransferRequest

# How many of the least loaded prefill instances a choice looks at.
_PREFILLS: Final = 16

# (number of the kind, side, the first words of the place) -> loads, ascending.
_Shelf: TypeAlias = tuple[int, Role, tuple[str, ...]]
# (cost, used, prefill id, decode id): of two pairs the lesser one is chosen.
_Weight: TypeAlias = tuple[int, float, str, str]


@dataclass(frozen=True, slots=True)
class _Entry:
    instance: Instance
    kind: int
    place: Place
    load: InstanceLoad
    available: int


@dataclass(slots=True)
class _Search:
    """One choice: the blocks that the prompt takes per kind, whom to leave out, and what was looked
    up already."""

    needs: dict[int, int]
    avoid: frozenset[str]
    heads: dict[_Shelf, list[InstanceLoad]] = field(default_factory=dict)


class PairIndex:
    """Belongs to one event loop. `put` and `remove` cost O(log n) comparisons."""

    def __init__(self, instances: Iterable[Instance] = ()) -> None:
        self._entries: dict[str, _Entry] = {}
        self._kinds: dict[Kind, int] = {}
        self._last_kind = 0
        self._of_kind: Counter[int] = Counter()
        # Two kinds that match, by number -> how far down prefill's fabrics the common one is.
        self._matches: dict[tuple[int, int], int] = {}
        self._shelves: dict[_Shelf, list[InstanceLoad]] = {}
        for instance in instances:
            self.put(instance)

    def put(self, instance: Instance) -> None:
        """Adds an instance, or takes note that the one with its id changed."""
        before = self._entries.get(instance.instance_id)
        load = instance_load(instance)
        if before is not None and before.instance.epoch == instance.epoch:
            kind, place = before.kind, before.place
        else:
            kind, place = self._number(kind_of(instance)), place_of(instance.labels)
        entry = _Entry(instance, kind, place, load, available_blocks(instance))
        if before is None or _stands(before) != _stands(entry):
            if before is not None:
                self._unshelve(before)
            for shelf in _shelves_of(entry):
                insort(self._shelves.setdefault(shelf, []), load)
        self._entries[instance.instance_id] = entry
        self._of_kind[kind] += 1
        if before is not None:
            self._forget(before.kind)

    def remove(self, instance_id: str) -> None:
        entry = self._entries.pop(instance_id)
        self._unshelve(entry)
        self._forget(entry.kind)

    def choose(self, request: TransferRequest) -> Pair:
        """The pair of least cost of two ready instances with one model and layouts that map.

        The cost is what both have running, waiting and reserved, plus their distance in steps
        (scheduler/topology.py), plus one for each fabric that prefill would rather use: a pair in
        one rack is taken before one across the zone while it has no more than one request more. Of
        equal pairs the one with less of its KV cache in use, then the first by id. An instance
        takes part where the blocks of the prompt are neither reserved by others nor reported as
        used.

        Looks at the 16 least loaded prefill instances of each kind, and for each at the least
        loaded decode instance of its NUMA node, host, rack, zone and of all. Raises PromptTooLong
        where the prompt fits into no cache at all, and NoCapacity with the `reasons` otherwise.
        """
        pair = self.find(request)
        if pair is None:
            raise refusal((entry.instance for entry in self._entries.values()), request)
        return pair

    def find(self, request: TransferRequest) -> Pair | None:
        """As `choose`, with None where there is no pair: only the reasons take a look at all."""
        tokens = request.prompt_tokens or 0
        search = _Search(
            {
                number: kind.layout.blocks_for(tokens)
                for kind, number in self._kinds.items()
                if request.model in (None, kind.model)
            },
            frozenset(request.avoid),
        )
        weights = (
            self._least_weight(search, ours, theirs, steps)
            for (ours, theirs), steps in self._matches.items()
            if ours in search.needs
        )
        best = min((weight for weight in weights if weight is not None), default=None)
        if best is None:
            return None
        prefill, decode = (self._entries[instance_id].instance for instance_id in best[2:])
        return Pair(prefill, decode, blocks_for(prefill, request), blocks_for(decode, request))

    def _least_weight(self, search: _Search, ours: int, theirs: int, steps: int) -> _Weight | None:
        """That of the best pair of these two kinds."""
        everywhere = self._heads(search, (theirs, Role.DECODE, ()))
        if not everywhere:
            return None
        least = everywhere[0]
        best: _Weight | None = None
        prefills = self._fitting(search, (ours, Role.PREFILL, ()))
        for requests, used, name in islice(prefills, _PREFILLS):
            # No pair with this prefill instance or one after it can weigh less than this.
            bound = (requests + least[0] + steps, used + least[1], name, "")
            if best is not None and bound > best:
                break
            place, nearest = self._entries[name].place, 0
            for depth in _depths(place):
                floor = requests + least[0] + nearest + steps
                if best is not None and nearest and floor >= best[0]:
                    break  # whoever is farther costs no less
                heads = self._heads(search, (theirs, Role.DECODE, place[:depth]))
                nearest = len(LABELS) - depth + 1
                decode = next((head for head in heads if head[2] != name), None)
                if decode is None:
                    continue
                apart = distance(place, self._entries[decode[2]].place)
                cost = requests + decode[0] + apart + steps
                weight = (cost, used + decode[1], name, decode[2])
                if best is None or weight < best:
                    best = weight
        return best

    def _heads(self, search: _Search, shelf: _Shelf) -> list[InstanceLoad]:
        """The first two that fit: two, as the first may be the prefill instance itself."""
        heads = search.heads.get(shelf)
        if heads is None:
            heads = search.heads[shelf] = list(islice(self._fitting(search, shelf), 2))
        return heads

    def _fitting(self, search: _Search, shelf: _Shelf) -> Iterator[InstanceLoad]:
        """Whose blocks for the prompt are neither reserved by others nor reported as used."""
        need, entries, avoid = search.needs[shelf[0]], self._entries, search.avoid
        return (
            load
            for load in self._shelves.get(shelf, ())
            if entries[load[2]].available >= need and load[2] not in avoid
        )

    def _number(self, kind: Kind) -> int:
        number = self._kinds.get(kind)
        if number is None:
            self._last_kind += 1
            number = self._kinds[kind] = self._last_kind
            for other, its in self._kinds.items():
                if mismatch_of(kind, other) is None:
                    self._matches[number, its] = fabric_steps(kind, other)
                if mismatch_of(other, kind) is None:
                    self._matches[its, number] = fabric_steps(other, kind)
        return number

    def _forget(self, number: int) -> None:
        """One instance less is of this kind; with the last one the kind goes."""
        self._of_kind[number] -= 1
        if not self._of_kind[number]:
            del self._of_kind[number]
            self._kinds = {kind: its for kind, its in self._kinds.items() if its != number}
            self._matches = {
                pair: steps for pair, steps in self._matches.items() if number not in pair
            }

    def _unshelve(self, entry: _Entry) -> None:
        for shelf in _shelves_of(entry):
            loads = self._shelves[shelf]
            del loads[bisect_left(loads, entry.load)]
            if not loads:
                del self._shelves[shelf]


def choose_pair(instances: Iterable[Instance], request: TransferRequest) -> Pair:
    """`PairIndex.choose` among these instances."""
    return PairIndex(instances).choose(request)


def _stands(entry: _Entry) -> tuple[object, ...]:
    """What decides on which shelves an entry stands, and where."""
    instance = entry.instance
    return entry.load, instance.state, instance.role, entry.kind, entry.place


def _depths(place: Place) -> list[int]:
    """How many words of the place a shelf goes by, the nearest first; 0 is everywhere.

    A label that is missing makes no shelf: where one instance lacks it, all are taken to.
    """
    return [depth for depth in range(len(place), 0, -1) if place[depth - 1]] + [0]


def _shelves_of(entry: _Entry) -> Iterator[_Shelf]:
    if entry.instance.state is not InstanceState.READY:
        return
    for side in SIDES:
        if not entry.instance.role.serves(side):
            continue
        if side is Role.PREFILL:
            yield entry.kind, side, ()
        else:
            for depth in _depths(entry.place):
                yield entry.kind, side, entry.place[:depth]
