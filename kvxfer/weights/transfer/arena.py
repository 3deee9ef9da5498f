"""Where an inference rank stages what it wants: one region, a place for each of its boxes."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvxfer.weights.holdings import Holding, Holdings

ALIGNMENT: Final = 256
"""Bytes; enough for any dtype and for the vector loads of processors and GPUs."""


class Place(NamedTuple):
    """Where a box is in an arena. Its elements are contiguous, the last dimension fastest."""

    holding: Holding
    """The box: its parameter, dtype and shape."""
    offset: int
    """Bytes from the begin of the arena."""
    nbytes: int

    @property
    def padded(self) -> int:
        """Bytes until the next box may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class Arena(NamedTuple):
    """Where an inference rank stages what it wants (`WeightReceiver.arena`). Equal holdings have
    equal arenas, so senders know them without being told."""

    places: dict[str, Place]
    """By the names of parameters. What is tied to another one has no place."""
    nbytes: int


def arena_of(holdings: Holdings) -> Arena:
    """By the names of the parameters; what is tied to another one has no place."""
    places: dict[str, Place] = {}
    at = 0
    for holding in sorted(holdings.parameters, key=lambda each: each.name):
        if holding.name not in holdings.tied:
            places[holding.name] = place = Place(holding, at, holding.nbytes)
            at += place.padded
    return Arena(places, max(at, 1))
