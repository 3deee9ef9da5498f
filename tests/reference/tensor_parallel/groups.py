"""Groups of small models, whose ranks find updates in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvxfer.errors import NotStaged
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.shards import Shard, cut
from kvxfer.reference.staging import Staging
from kvxfer.reference.tensor_parallel.model import GroupSettings, TensorParallelModel
from kvxfer.reference.tensor_parallel.rank import MakeStaging
from kvxfer.reference.weights import seeded_weights
from kvxfer.weights.transfer.staged import Staged
from tests.reference.tiny import TINY
from verify.polling import PATIENCE

PATIENT = GroupSettings(
    patience_seconds=PATIENCE,
    start_seconds=4 * PATIENCE,
    step_seconds=4 * PATIENCE,
    apply_seconds=4 * PATIENCE,
)


class Seeds:
    """A staging whose updates are "seed:version": seeded weights of that number. A rank fails or
    freezes if `folder` has a file `pin-RANK`, `apply-RANK` or `freeze-RANK`; each writes the calls
    that it gets to `told-RANK`."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, folder: Path, shard: Shard) -> None:
        self._config, self._dtype, self._folder, self._shard = config, dtype, folder, shard
        self._pinned = 0

    def pin(self, update_id: str) -> Staged:
        self._tell(f"pin {update_id}")
        if self._to_fail("pin"):
            raise NotStaged(f"{update_id} is not staged")
        self._pinned = int(update_id.partition(":")[2])
        return Staged(update_id, self._pinned, None)

    def unpin(self, update_id: str) -> None:
        self._tell(f"unpin {update_id}")

    def boxes(self) -> Mapping[str, Tensor]:
        if self._to_fail("apply"):
            raise OSError("the memory of the update is gone")
        if self._to_fail("freeze"):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGSTOP)
        return cut(
            self._config, seeded_weights(self._config, self._pinned, dtype=self._dtype), self._shard
        )

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        self._tell(f"applied {staged.version} {pause_seconds is not None}")

    def broken(self, error: BaseException) -> None:
        self._tell(f"broken {type(error).__name__}")

    @property
    def address(self) -> str:
        return f"rank-{self._shard.rank}"

    def close(self) -> None:
        self._tell("close")

    def _to_fail(self, what: str) -> bool:
        return (self._folder / f"{what}-{self._shard.rank}").exists()

    def _tell(self, what: str) -> None:
        with (self._folder / f"told-{self._shard.rank}").open("a") as told:
            told.write(what + "\n")


def _seeds(config: LlamaConfig, dtype: torch.dtype, folder: Path, shard: Shard) -> Staging:
    return Seeds(config, dtype, folder, shard)


def group(
    ranks: int,
    folder: Path,
    *,
    config: LlamaConfig = TINY,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    settings: GroupSettings = PATIENT,
    staging: MakeStaging | None = None,
) -> TensorParallelModel:
    """Returns a group that has yet to be entered."""
    return TensorParallelModel(
        config,
        functools.partial(seeded_weights, config, seed, dtype=dtype),
        ranks=ranks,
        num_blocks=128,
        block_size=4,
        staging=staging or functools.partial(_seeds, config, dtype, folder),
        settings=settings,
    )


def told(folder: Path, rank: int) -> list[str]:
    """Returns the calls that the staging of a rank got."""
    path = folder / f"told-{rank}"
    return path.read_text().splitlines() if path.exists() else []
