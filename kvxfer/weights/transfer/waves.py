"""The cut of an update into waves that each fit the arenas of all inference ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvxfer.errors import WeightsMismatch
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.plan.boxes import Ints
from kvxfer.weights.transfer.arena import arena_of

_LAYER: Final = re.compile(r"(.*?\.\d+)\.")
_NUMBER: Final = re.compile(r"(\d+)")


class Bounded(NamedTuple):
    """An inference rank, and the most bytes that it stages at once."""

    name: str
    holdings: Holdings
    arena_bytes: int


def waves_of(ranks: Sequence[Bounded]) -> tuple[tuple[str, ...], ...]:
    """Returns the parameters of each wave, as named at inference.

    They are in the order of their names, in which numbers compare as numbers. A layer is in one
    wave if every arena can take it, and otherwise spread over several. Raises WeightsMismatch that
    names a parameter that is too large.
    """
    bounds = np.array([each.arena_bytes for each in ranks], np.int64)
    waves: list[list[str]] = []
    taken = np.zeros_like(bounds)
    for layer in _layers(_sizes(ranks)):
        whole = sum(layer.values(), np.zeros_like(bounds))
        # A layer that does not fit one wave is spread over several.
        parts = [layer] if (whole <= bounds).all() else [{name: layer[name]} for name in layer]
        for part in parts:
            size = sum(part.values(), np.zeros_like(bounds))
            if (size > bounds).any():
                raise _too_large(next(iter(part)), size, ranks)
            if not waves or (taken + size > bounds).any():
                waves.append([])
                taken = np.zeros_like(bounds)
            waves[-1] += part
            taken = taken + size
    return tuple(map(tuple, waves))


def _sizes(ranks: Sequence[Bounded]) -> dict[str, Ints]:
    """Returns the bytes that each parameter takes in each rank's arena."""
    sizes: dict[str, Ints] = {}
    for rank, each in enumerate(ranks):
        for name, place in arena_of(each.holdings).places.items():
            of_name = sizes.setdefault(name, np.zeros(len(ranks), np.int64))
            of_name[rank] = place.padded
    return sizes


def _layers(sizes: dict[str, Ints]) -> list[dict[str, Ints]]:
    layers: dict[str, dict[str, Ints]] = {}
    for name in sorted(sizes, key=_order):
        found = _LAYER.match(name)
        layers.setdefault(found[1] if found else name, {})[name] = sizes[name]
    return list(layers.values())


def _order(name: str) -> list[tuple[int, str]]:
    words = enumerate(_NUMBER.split(name))
    return [(int(word), "") if at % 2 else (0, word) for at, word in words]


def _too_large(name: str, size: Ints, ranks: Sequence[Bounded]) -> WeightsMismatch:
    at = int(np.argmax(size - np.array([each.arena_bytes for each in ranks])))
    return WeightsMismatch(
        f"{name} takes {size[at]} bytes at {ranks[at].name}, whose arena_bytes are "
        f"{ranks[at].arena_bytes}; a wave has whole parameters, so raise arena_bytes"
    )
