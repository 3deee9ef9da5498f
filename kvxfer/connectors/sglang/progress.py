"""The progress of a transfer, in the numbers that SGLang polls for."""

from __future__ import annotations

from enum import IntEnum


class Progress(IntEnum):
    """SGLang's KVPoll."""

    FAILED = 0
    """Nothing lands in the pages or reads them any more."""
    BOOTSTRAPPING = 1
    WAITING = 2
    """The other side is known."""
    TRANSFERRING = 3
    SUCCESS = 4
