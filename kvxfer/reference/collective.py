"""The operations between ranks that compute one model together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvxfer.reference.shards import Shard


class Collective(Protocol):
    """A group of ranks. All make the same calls in the same order, with tensors of equal shapes."""

    @property
    def shard(self) -> Shard:
        """The calling rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, with the same bits on all ranks. Changes `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Returns the tensors of all ranks, one after another along the last dimension."""
