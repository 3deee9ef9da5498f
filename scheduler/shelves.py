"""The instances in order: by load, by room and by size, each in its kind, side and place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.layout import KvLayout
from kvxfer.scheduler.pairing import SIDES, Kind
from kvxfer.scheduler.topology import Place
from kvxfer.transfers import TransferRequest

LoadKey: TypeAlias = tuple[float, float, str]
"""The cost of the load, the share of the KV cache in use, the id: the least loaded come first."""
RoomKey: TypeAlias = tuple[int, str]
"""A number of blocks, negated, and the id: those with the most come first."""
Order: TypeAlias = Literal["room", "size"]
"""The order by the blocks that a transfer may count on, or by all blocks of an instance."""
Shelf: TypeAlias = tuple[int, Role, tuple[str, ...] | Order]
"""The number of the kind, the side, and the order, which for load is the first words of a place."""

ORDERS: Final[tuple[Order, ...]] = ("room", "size")


class Entry(Struct, frozen=True):
    """An instance and its keys in the index."""

    instance: Instance
    kind: int
    place: Place
    load: LoadKey
    available: int


def depths(place: Place) -> list[int]:
    """Returns how many words of the place each shelf has, the nearest first; 0 is everywhere.

    A missing label makes no shelf: if one instance lacks it, all are assumed to.
    """
    return [depth for depth in range(len(place), 0, -1) if place[depth - 1]] + [0]


def shelves_of(entry: Entry) -> Iterator[tuple[Shelf, LoadKey | RoomKey]]:
    """Yields the shelves of an instance, and its key on each."""
    for side in SIDES:
        if not stands(entry, entry.kind, side):
            continue
        for order in ORDERS:
            yield (entry.kind, side, order), key_by(order, entry)
        for place in places_of(entry, side):
            yield (entry.kind, side, place), entry.load


def places_of(entry: Entry, side: Role) -> list[tuple[str, ...]]:
    """Returns the places where an instance is sorted by load: for prefill only everywhere, as a
    search asks for the least loaded of all."""
    return [entry.place[:depth] for depth in depths(entry.place)] if side is Role.DECODE else [()]


def stands(entry: Entry, kind: int, side: Role) -> bool:
    """Whether the instance is ready and of this kind and side."""
    instance = entry.instance
    return (
        entry.kind == kind and instance.state is InstanceState.READY and instance.role.serves(side)
    )


def more_room(before: Entry, after: Entry) -> bool:
    """Whether the instance may now be in a pair that it could not be in before."""
    had, has = before.instance, after.instance
    return has.state is InstanceState.READY and (
        after.available > before.available
        or (had.state, had.role, before.kind) != (has.state, has.role, after.kind)
        or had.load.models != has.load.models
    )


def key_by(order: Order, entry: Entry) -> RoomKey:
    instance = entry.instance
    blocks = entry.available if order == "room" else instance.num_blocks
    return -blocks, instance.instance_id


class Shelves:
    """The shelves, in one event loop. A change of one instance costs O(log n) comparisons."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._shelves: dict[Shelf, list[Any]] = {}
        self._states: dict[tuple[int, Role], Counter[InstanceState]] = {}
        # Name of an alias or adapter -> the instances that serve it beside their model.
        self._holders: dict[str, set[str]] = {}

    def put(self, entry: Entry) -> None:
        """Adds an instance, or moves the one with its id."""
        self._move(self.entries.get(entry.instance.instance_id), entry)
        self.entries[entry.instance.instance_id] = entry

    def remove(self, instance_id: str) -> Entry:
        entry = self.entries.pop(instance_id)
        self._move(entry, None)
        return entry

    def loads(self, shelf: Shelf) -> Sequence[LoadKey]:
        return self._shelves.get(shelf, ())

    def among(self, kind: Kind, request: TransferRequest) -> set[str] | None:
        """Returns None if all instances of the kind serve the requested model; else the instances
        of all kinds that serve it beside their model."""
        if request.model is None or request.model == kind.model:
            return None
        return self._holders.get(request.model, set())

    def states(self, kind: int, role: Role) -> Counter[InstanceState]:
        return self._states.get((kind, role), Counter())

    def first(self, kind: int, side: Role, order: Order, among: set[str] | None) -> RoomKey | None:
        """Returns the key of the first instance in the order; `among` leaves out all others."""
        keys: Sequence[RoomKey] = self._shelves.get((kind, side, order), ())
        if among is None:
            return keys[0] if keys else None
        if _few(len(among), len(keys)):
            return min(
                (key_by(order, entry) for entry in self._of(among, kind, side)), default=None
            )
        return next((key for key in keys if key[1] in among), None)

    def needs(
        self, layout: KvLayout, kind: int, request: TransferRequest, among: set[str] | None
    ) -> dict[Role, int]:
        """Returns the KV blocks that the request takes of an instance, by its side: those of the
        prompt, and where the answer is computed also those of the expected output. The output
        counts only up to the size of the largest instance that serves the request."""
        prompt, output = request.prompt_tokens or 0, request.output_tokens or 0
        blocks = layout.blocks_for(prompt)
        needs = dict.fromkeys(SIDES, blocks)
        if output:
            sides = SIDES if request.aggregated else [Role.DECODE]
            firsts = (self.first(kind, side, "size", among) for side in sides)
            largest = max((-first[0] for first in firsts if first is not None), default=0)
            whole = max(blocks, min(layout.blocks_for(prompt + output), largest))
            needs.update(dict.fromkeys(sides, whole))
        return needs

    def two(self, kind: int, side: Role, among: set[str] | None) -> list[str]:
        """Returns the ids of two instances to choose, or of fewer if there are not as many."""
        keys: Sequence[RoomKey] = self._shelves.get((kind, side, "size"), ())
        if among is not None and _few(len(among), len(keys)):
            ids = (entry.load[2] for entry in self._of(among, kind, side))
        else:
            ids = (name for _, name in keys if among is None or name in among)
        return list(islice(ids, 2))

    def few(self, kind: int, side: Role, need: int, among: set[str] | None) -> list[Entry] | None:
        """Returns the instances with `need` blocks of room, in no order; None if these are not few
        among all. A look along a shelf by load then soon finds some of them."""
        keys: Sequence[RoomKey] = self._shelves.get((kind, side, "room"), ())
        fitting = bisect_left(keys, (1 - need,))
        if _few(fitting, len(keys)):
            names = (name for _, name in keys[:fitting])
            return [self.entries[name] for name in names if among is None or name in among]
        if among is not None and _few(len(among), len(keys)):
            return [entry for entry in self._of(among, kind, side) if entry.available >= need]
        return None

    def _of(self, names: set[str], kind: int, side: Role) -> Iterator[Entry]:
        entries = (self.entries[name] for name in names)
        return (entry for entry in entries if stands(entry, kind, side))

    def _move(self, before: Entry | None, after: Entry | None) -> None:
        had = {} if before is None else dict(shelves_of(before))
        has = {} if after is None else dict(shelves_of(after))
        for shelf, key in had.items():
            if has.get(shelf) != key:
                keys = self._shelves[shelf]
                del keys[bisect_left(keys, key)]
                if not keys:
                    del self._shelves[shelf]
        for shelf, key in has.items():
            if had.get(shelf) != key:
                insort(self._shelves.setdefault(shelf, []), key)
        self._count(before, after)
        self._name(before, after)

    def _count(self, before: Entry | None, after: Entry | None) -> None:
        had, has = (_census(entry) for entry in (before, after))
        if had == has:
            return
        if had is not None:
            states = self._states[had[:2]]
            states[had[2]] -= 1
            if not states.total():
                del self._states[had[:2]]
        if has is not None:
            self._states.setdefault(has[:2], Counter())[has[2]] += 1

    def _name(self, before: Entry | None, after: Entry | None) -> None:
        had = () if before is None else before.instance.load.models
        has = () if after is None else after.instance.load.models
        if had == has:
            return
        instance_id = (before or after).load[2]  # type: ignore[union-attr]
        for name in set(had).difference(has):
            holders = self._holders[name]
            holders.remove(instance_id)
            if not holders:
                del self._holders[name]
        for name in set(has).difference(had):
            self._holders.setdefault(name, set()).add(instance_id)


def _census(entry: Entry | None) -> tuple[int, Role, InstanceState] | None:
    return None if entry is None else (entry.kind, entry.instance.role, entry.instance.state)


def _few(some: int, of: int) -> bool:
    """Whether a look at all of `some` is less work than a search among `of` for a few of them."""
    return 4 * some * some <= of
