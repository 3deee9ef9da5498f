"""Which workers were lost, and when: what a request that comes later has to know."""

from __future__ import annotations

from typing import Final, TypeAlias

from kvxfer.clock import Clock
from kvxfer.errors import KvxferError, without_traceback

MAX_REMEMBERED: Final = 1024

Worker: TypeAlias = tuple[str, int]
"""Instance id and epoch."""


class LostWorkers:
    """The last loss of each rank of so many workers; the one that was lost longest ago is forgotten
    first. Loop only."""

    def __init__(self, clock: Clock, max_remembered: int = MAX_REMEMBERED) -> None:
        self._clock = clock
        self._max_remembered = max_remembered
        self._losses: dict[Worker, dict[int, tuple[float, KvxferError]]] = {}

    def __len__(self) -> int:
        return len(self._losses)

    def add(self, worker: Worker, rank: int, error: KvxferError) -> None:
        """The connection to a rank has ended now."""
        losses = self._losses.pop(worker, {})
        losses[rank] = self._clock.monotonic(), without_traceback(error)
        self._losses[worker] = losses
        if len(self._losses) > self._max_remembered:
            del self._losses[next(iter(self._losses))]

    def since(self, worker: Worker, issued_at: float) -> dict[int, KvxferError]:
        """Why ranks were lost after a ticket was issued; none where it does not say when."""
        if not issued_at:
            return {}
        losses = self._losses.get(worker, {})
        # By the clock of now, which may have been set since.
        issued = self._clock.monotonic() - (self._clock.unix() - issued_at)
        return {rank: error for rank, (at, error) in losses.items() if at >= issued}
