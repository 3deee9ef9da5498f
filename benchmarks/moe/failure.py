"""How a run fails."""

from __future__ import annotations


class RankFailed(Exception):
    """A process of the benchmark has ended early."""
