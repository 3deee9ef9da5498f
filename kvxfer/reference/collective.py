"""What ranks that compute one model together ask of each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvxfer.reference.shards import Shard


class Collective(Protocol):
    """Every rank makes the same calls in the same order, with tensors of equal shapes."""

    @property
    def shard(self) -> Shard:
        """This rank."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits at each of them. Changes `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """The tensors of all ranks one after another along the last dimension."""
