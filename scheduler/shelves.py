"""The instances in order: by load, by room and by size, each in its kind, side and place."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.scheduler.pairing import SIDES, Kind
from kvxfer.scheduler.topology import Place
from kvxfer.transfers import TransferRequest

LoadKey: TypeAlias = tuple[float, float, str]
"""What the load costs, the share of the KV cache in use, the id: the least loaded come first."""
RoomKey: TypeAlias = tuple[int, str]
"""Minus a number of blocks, the id: those with the most come first."""
Order: TypeAlias = Literal["room", "size"]
"""By the blocks that a transfer may count on, or by all that an instance has."""
Shelf: TypeAlias = tuple[int, Role, tuple[str, ...] | Order]
"""The number of the kind, the side, and the order; that by load has the first words of a place."""

ORDERS: Final[tuple[Order, ...]] = ("room", "size")


class Entry(Struct, frozen=True):
    """An instance and what the index goes by."""

    instance: Instance
    kind: int
    place: Place
    load: LoadKey
    available: int


def depths(place: Place) -> list[int]:
    """How many words of the place a shelf goes by, the nearest first; 0 is everywhere.

    A label that is missing makes no shelf: where one instance lacks it, all are taken to.
    """
    return [depth for depth in range(len(place), 0, -1) if place[depth - 1]] + [0]


def shelves_of(entry: Entry) -> Iterator[tuple[Shelf, LoadKey | RoomKey]]:
    """Where an instance stands, and what it is sorted by there."""
    for side in SIDES:
        if not stands(entry, entry.kind, side):
            continue
        for order in ORDERS:
            yield (entry.kind, side, order), key_by(order, entry)
        for place in places_of(entry, side):
            yield (entry.kind, side, place), entry.load


def places_of(entry: Entry, side: Role) -> list[tuple[str, ...]]:
    """The places where it is sorted by load: of prefill only the least loaded of all are asked
    for."""
    return [entry.place[:depth] for depth in depths(entry.place)] if side is Role.DECODE else [()]


def stands(entry: Entry, kind: int, side: Role) -> bool:
    """Whether it is an instance of this kind and side to choose."""
    instance = entry.instance
    return (
        entry.kind == kind and instance.state is InstanceState.READY and instance.role.serves(side)
    )


def more_room(before: Entry, after: Entry) -> bool:
    """Whether there may be a pair with it that there was not."""
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
    """Belongs to one event loop. A change of one instance costs O(log n) comparisons."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._shelves: dict[Shelf, list[Any]] = {}
        self._states: dict[tuple[int, Role], Counter[InstanceState]] = {}
        # Of aliases and adapters: each name -> who serves it beside its model.
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
        """Of all instances those that serve the model which is asked for, where a kind does not;
        None where all of the kind do."""
        if request.model is None or request.model == kind.model:
            return None
        return self._holders.get(request.model, set())

    def states(self, kind: int, role: Role) -> Counter[InstanceState]:
        return self._states.get((kind, role), Counter())

    def first(self, kind: int, side: Role, order: Order, among: set[str] | None) -> RoomKey | None:
        """Who has most; `among` leaves out all others."""
        keys: Sequence[RoomKey] = self._shelves.get((kind, side, order), ())
        if among is None:
            return keys[0] if keys else None
        if _few(len(among), len(keys)):
            return min(
                (key_by(order, entry) for entry in self._of(among, kind, side)), default=None
            )
        return next((key for key in keys if key[1] in among), None)

    def two(self, kind: int, side: Role, among: set[str] | None) -> list[str]:
        """The ids of two instances to choose; of fewer where there are not as many."""
        keys: Sequence[RoomKey] = self._shelves.get((kind, side, "size"), ())
        if among is not None and _few(len(among), len(keys)):
            ids = (entry.load[2] for entry in self._of(among, kind, side))
        else:
            ids = (name for _, name in keys if among is None or name in among)
        return list(islice(ids, 2))

    def few(self, kind: int, side: Role, need: int, among: set[str] | None) -> list[Entry] | None:
        """Who has `need` blocks of room, in no order; None where these are not few among all: a
        look along a shelf by load soon finds some of them."""
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
    """Whether it is less work to look at all of them than along the others for a few of them."""
    return 4 * some * some <= of
