"""The distance of two instances, by the labels that they registered with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

LABELS: Final = ("zone", "rack", "host", "numa")
"""The labels that say where an instance runs, the widest first."""

Place: TypeAlias = tuple[str, str, str, str]


def place_of(labels: Mapping[str, str]) -> Place:
    """Returns a word for each of LABELS; the word for a missing label is empty."""
    zone, rack, host, numa = (labels.get(label, "") for label in LABELS)
    return zone, rack, host, numa


def distance(one: Place, other: Place) -> int:
    """Returns 0 on one NUMA node, 1 on one host, 2 in one rack, 3 in one zone, 4 beyond.

    Instances without labels are all in one place.
    """
    for depth, (word, other_word) in enumerate(zip(one, other, strict=True)):
        if word != other_word:
            return len(LABELS) - depth
    return 0
