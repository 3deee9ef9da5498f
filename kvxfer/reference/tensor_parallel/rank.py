"""One rank: its part of the model and of the cache, and the updates that it has staged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.collective import Collective
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.devices import cache_on
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.shards import Shard, cut, local_config
from kvxfer.reference.staging import Staging
from kvxfer.reference.tensor_parallel.gloo import GlooCollective
from kvxfer.weights.transfer.staged import Staged

LoadWeights: TypeAlias = Callable[[], Mapping[str, Tensor]]
"""Whole parameters; each rank keeps its boxes. Picklable: each process calls it."""
MakeStaging: TypeAlias = Callable[[Shard], Staging]
"""Picklable, too; called in the process of the rank."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What every rank is told, each in a process apart."""

    config: LlamaConfig
    ranks: int
    load: LoadWeights
    staging: MakeStaging | None
    num_blocks: int
    block_size: int
    threads: int
    """Of torch; the bits of a result may depend on it."""
    meeting: Path
    start_seconds: float
    step_seconds: float


class Rank:
    """One thread uses it."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        """Loads its weights; join() makes the model of them."""
        self.shard = Shard(rank, spec.ranks)
        self._spec = spec
        self._config = local_config(spec.config, spec.ranks)
        self._boxes = cut(spec.config, spec.load(), self.shard)
        self.staging: Staging | None = None
        self.model: LlamaModel
        self._pinned: str | None = None

    def join(self) -> None:
        """Returns once all ranks have called it. Raises RuntimeError where one does not."""
        spec = self._spec
        collective: Collective | None = None
        if spec.ranks > 1:
            collective = GlooCollective(
                spec.meeting, self.shard, spec.start_seconds, spec.step_seconds
            )
        self.model = LlamaModel(spec.config, self._boxes, collective)
        self._boxes = {}
        if spec.staging is not None:
            self.staging = spec.staging(self.shard)
        self.cache = cache_on(
            self.model.device,
            self._config,
            spec.num_blocks,
            spec.block_size,
            dtype=self.model.dtype,
        )

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """As `LlamaModel.prefill`, in the cache of this rank."""
        return self.model.prefill(torch.tensor(tokens), self.cache, torch.tensor(blocks), on_layer)

    def decode(self, token: int, position: int, blocks: Sequence[int]) -> Tensor:
        """As `LlamaModel.decode`, in the cache of this rank."""
        return self.model.decode(token, position, self.cache, torch.tensor(blocks))

    @property
    def address(self) -> str:
        """Where updates are sent to; empty where none are taken."""
        return "" if self.staging is None else self.staging.address

    def pin(self, update_id: str) -> Staged:
        """Raises NotStaged, and InvalidArgument where this group takes no updates."""
        staged = self._take_updates().pin(update_id)
        self._pinned = update_id
        return staged

    def unpin(self) -> None:
        """Does nothing where nothing is pinned."""
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            self._take_updates().unpin(pinned)

    def apply(self, staged: Staged) -> None:
        """Copies the boxes of the pinned update. What fails in it ends the instance."""
        self.model.apply(self._take_updates().boxes(), staged.version)
        self._pinned = None

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        self._take_updates().applied(staged, pause_seconds)

    def broken(self, error: BaseException) -> None:
        self._take_updates().broken(error)

    def _take_updates(self) -> Staging:
        if self.staging is None:
            raise InvalidArgument("this group takes no updates of its weights; pass a staging")
        return self.staging

    def close(self) -> None:
        if self.staging is not None:
            self.staging.close()
