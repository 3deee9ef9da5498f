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
"""Returns whole parameters; each rank keeps its boxes. Picklable: each process calls it."""
MakeStaging: TypeAlias = Callable[[Shard], Staging]
"""Returns the staging of a rank. Picklable, too; called in the process of the rank."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """The settings that are the same for every rank, each in a separate process."""

    config: LlamaConfig
    ranks: int
    load: LoadWeights
    staging: MakeStaging | None
    num_blocks: int
    block_size: int
    threads: int
    """Threads of torch; the bits of a result may depend on their number."""
    meeting: Path
    start_seconds: float
    step_seconds: float


class Rank:
    """One rank of a model. One thread uses it."""

    def __init__(self, spec: RankSpec, rank: int) -> None:
        """Loads the rank's weights; join() makes the model from them."""
        self.shard = Shard(rank, spec.ranks)
        self._spec = spec
        self._config = local_config(spec.config, spec.ranks)
        self._boxes = cut(spec.config, spec.load(), self.shard)
        self.staging: Staging | None = None
        self.model: LlamaModel
        self._pinned: str | None = None

    def join(self) -> None:
        """Makes the model, once all ranks have called this. Raises RuntimeError if one does not."""
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
        """Computes a prompt like `LlamaModel.prefill`, in the cache of this rank."""
        return self.model.prefill(torch.tensor(tokens), self.cache, torch.tensor(blocks), on_layer)

    def decode(self, token: int, position: int, blocks: Sequence[int]) -> Tensor:
        """Takes a step like `LlamaModel.decode`, in the cache of this rank."""
        return self.model.decode(token, position, self.cache, torch.tensor(blocks))

    @property
    def address(self) -> str:
        """The address that updates are sent to; empty if none are taken."""
        return "" if self.staging is None else self.staging.address

    def pin(self, update_id: str) -> Staged:
        """Pins an update. Raises NotStaged, and InvalidArgument if this group takes no updates."""
        staged = self._take_updates().pin(update_id)
        self._pinned = update_id
        return staged

    def unpin(self) -> None:
        """Releases the pinned update, if there is one."""
        if self._pinned is not None:
            pinned, self._pinned = self._pinned, None
            self._take_updates().unpin(pinned)

    def apply(self, staged: Staged) -> None:
        """Copies the boxes of the pinned update. A failure ends the instance."""
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
