"""The arena of an inference rank: one memory region with a place for each of its boxes."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvxfer.weights.holdings import Holding, Holdings

ALIGNMENT: Final = 256
"""Bytes; enough for any dtype and for the vector loads of processors and GPUs."""


class Place(NamedTuple):
    """The place of a box in an arena. Its elements are contiguous, the last dimension fastest."""

    holding: Holding
    """The box: its parameter, dtype and shape."""
    offset: int
    """The offset from the begin of the arena, in bytes."""
    nbytes: int

    @property
    def padded(self) -> int:
        """Bytes until the next box may begin."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


class Arena(NamedTuple):
    """The places in which an inference rank stages its boxes (`WeightReceiver.arena`). Equal
    holdings have equal arenas, so senders can compute them."""

    places: dict[str, Place]
    """The places by parameter name. A parameter that is tied to another one has none."""
    nbytes: int


def arena_of(holdings: Holdings) -> Arena:
    """Lays out boxes in the order of their names. A parameter tied to another one gets no place."""
    places: dict[str, Place] = {}
    at = 0
    for holding in sorted(holdings.parameters, key=lambda each: each.name):
        if holding.name not in holdings.tied:
            places[holding.name] = place = Place(holding, at, holding.nbytes)
            at += place.padded
    return Arena(places, max(at, 1))
