"""Percentiles of measured times."""

from __future__ import annotations


def percentile(values: list[float], share: float) -> float:
    """Returns the value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
