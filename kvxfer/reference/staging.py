"""The staged weights of an update, for a rank of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kvxfer.weights.transfer.staged import Staged


class Staging(Protocol):
    """The staged updates of one rank. Called by the thread that its model runs in."""

    def pin(self, update_id: str) -> Staged:
        """Keeps an update that is staged until it is applied or unpinned. Raises NotStaged."""

    def unpin(self, update_id: str) -> None:
        """Releases a pinned update, which will not be applied."""

    def boxes(self) -> Mapping[str, Tensor]:
        """Returns the pinned boxes of this rank, by the names of the checkpoint."""

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        """Reports that this rank serves the update. Rank 0 passes the whole instance's pause."""

    def broken(self, error: BaseException) -> None:
        """Reports that the update failed while it was applied: the instance serves nothing any
        more."""

    @property
    def address(self) -> str:
        """The address of the rank's engine for weight updates, which a coordinator may dial."""

    def close(self) -> None:
        """Closes the staging when the rank ends."""
