"""The error of a failed run."""

from __future__ import annotations


class RankFailed(Exception):
    """A process of the benchmark has ended early."""
