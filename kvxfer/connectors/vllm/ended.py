"""How a transfer ended, for the metrics of both sides. Plain data."""

from __future__ import annotations

from typing import Final, NamedTuple

DELIVERED: Final = "delivered"


class Ended(NamedTuple):
    """One transfer of one worker."""

    direction: str
    """send or receive."""
    outcome: str
    """DELIVERED, or the code of the error."""
    blocks: int = 0
    """Of those that travelled; 0 where it failed, like what follows."""
    nbytes: int = 0
    seconds: float = 0.0
