"""Where a rank of a model finds the weights of an update, once they have been staged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kvxfer.weights.transfer.staged import Staged


class Staging(Protocol):
    """Of one rank. Called by the thread that its model runs in."""

    def pin(self, update_id: str) -> Staged:
        """Keeps an update that is staged until it is applied or unpinned. Raises NotStaged."""

    def unpin(self, update_id: str) -> None:
        """It will not be applied."""

    def boxes(self) -> Mapping[str, Tensor]:
        """The pinned boxes of this rank, by the names of the checkpoint."""

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        """This rank serves the update. The pause is that of the whole instance, at rank 0."""

    def broken(self, error: BaseException) -> None:
        """It failed while applying: the instance serves nothing any more."""

    @property
    def address(self) -> str:
        """Of its engine for weight updates, which a coordinator may dial."""

    def close(self) -> None:
        """The rank ends."""
