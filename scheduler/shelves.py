"""Where a ready instance stands among those that it is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from msgspec import Struct

from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.scheduler.pairing import SIDES
from kvxfer.scheduler.topology import Place

LoadKey: TypeAlias = tuple[float, float, str]
"""What the load costs, the share of the KV cache in use, the id: the least loaded come first."""
Shelf: TypeAlias = tuple[int, Role, tuple[str, ...]]
"""The number of the kind, the side, and the first words of the place."""


class Entry(Struct, frozen=True):
    """An instance and what the index goes by."""

    instance: Instance
    kind: int
    place: Place
    load: LoadKey
    available: int


def stands(entry: Entry) -> tuple[object, ...]:
    """What decides on which shelves an entry stands, and where."""
    instance = entry.instance
    return entry.load, instance.state, instance.role, entry.kind, entry.place


def depths(place: Place) -> list[int]:
    """How many words of the place a shelf goes by, the nearest first; 0 is everywhere.

    A label that is missing makes no shelf: where one instance lacks it, all are taken to.
    """
    return [depth for depth in range(len(place), 0, -1) if place[depth - 1]] + [0]


def shelves_of(entry: Entry) -> Iterator[Shelf]:
    if entry.instance.state is not InstanceState.READY:
        return
    for side in SIDES:
        if not entry.instance.role.serves(side):
            continue
        if side is Role.PREFILL:
            yield entry.kind, side, ()
        else:
            for depth in depths(entry.place):
                yield entry.kind, side, entry.place[:depth]
