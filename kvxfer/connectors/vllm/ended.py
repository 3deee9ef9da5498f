"""The end of a transfer, for the metrics of both sides. Plain data."""

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
    """Blocks that were moved; 0 if the transfer failed, like the values below."""
    nbytes: int = 0
    seconds: float = 0.0
