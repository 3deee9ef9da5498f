"""A model over several processes; this one is rank 0."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import KvxferError, NotStaged
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.shards import local_config
from kvxfer.reference.staging import Staging
from kvxfer.reference.tensor_parallel.followers import Followers
from kvxfer.reference.tensor_parallel.messages import (
    Applied,
    Apply,
    Decode,
    Done,
    Meet,
    Pin,
    Prefill,
    Refused,
    Unpin,
)
from kvxfer.reference.tensor_parallel.rank import LoadWeights, MakeStaging, Rank, RankSpec
from kvxfer.settings import Seconds, check_bounds
from kvxfer.weights.transfer.staged import Staged


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """The time limits of a group of ranks. Raises InvalidArgument for values out of bounds."""

    patience_seconds: Seconds = 1.0
    """Seconds without a message after which a rank counts as frozen; up to three times as long if
    it waits for a core."""
    start_seconds: Seconds = 120.0
    """Seconds for all ranks to load their weights."""
    step_seconds: Seconds = 120.0
    """Seconds for the other ranks to take part in a sum."""
    apply_seconds: Seconds = 120.0
    """Seconds for all ranks to pin, or to apply, an update."""

    def __post_init__(self) -> None:
        check_bounds(self)


class TensorParallelModel:
    """A `LlamaModel` over several processes, for one thread at a time. Rank 0 is this process; the
    others are started when the model is entered, and end when it is left.

    With the same weights, thread count and number of ranks, the same calls give the same bits.
    If a rank is lost, the others end, and that call and all later ones raise RankLost.
    """

    def __init__(
        self,
        config: LlamaConfig,
        load: LoadWeights,
        *,
        ranks: int,
        num_blocks: int,
        block_size: int,
        staging: MakeStaging | None = None,
        settings: GroupSettings | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`load` and `staging` are called in the process of each rank. Raises InvalidArgument if
        the model cannot be split over `ranks`."""
        local_config(config, ranks)
        self.config = config
        self._settings = settings or GroupSettings()
        self._clock = clock
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvxfer-ranks-"))
        self._spec = RankSpec(
            config=config,
            ranks=ranks,
            load=load,
            staging=staging,
            num_blocks=num_blocks,
            block_size=block_size,
            threads=torch.get_num_threads(),
            meeting=Path(folder) / "meeting",
            start_seconds=self._settings.start_seconds,
            step_seconds=self._settings.step_seconds,
        )

        self.weight_addresses: list[str] = []
        """The address of each rank's engine for weight updates."""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.push(self._stack.pop_all())
            self._followers = Followers(self._spec, self._settings.patience_seconds, self._clock)
            undo.callback(self._followers.close)
            self._rank = undo.enter_context(contextlib.closing(Rank(self._spec, 0)))
            self._followers.gather(self._settings.start_seconds)
            self._followers.tell(Meet())
            with self._together():
                self._rank.join()
            others = self._followers.gather(self._settings.start_seconds)
            self.weight_addresses = [
                self._rank.address,
                *(each.address for each in others if isinstance(each, Done)),
            ]
            self._stack = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    @property
    def device(self) -> torch.device:
        return self._rank.model.device

    @property
    def cache(self) -> PagedKvCache:
        """Rank 0's part of the cache, to be passed to prefill() and decode()."""
        return self._rank.cache

    @property
    def staging(self) -> Staging | None:
        """The staging of rank 0."""
        return self._rank.staging

    @property
    def weights_version(self) -> int:
        return self._rank.model.weights_version

    @property
    def processes(self) -> list[int]:
        """The ids of the other ranks' processes."""
        return self._followers.processes

    def require(self) -> None:
        """Raises RankLost if a rank has been lost. Any thread."""
        self._followers.require()

    def prefill(
        self,
        tokens: Tensor,
        cache: PagedKvCache,
        blocks: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Computes a prompt like `LlamaModel.prefill`. `on_layer` is called for rank 0's layers,
        and must not raise."""
        del cache
        step = Prefill(tokens.tolist(), blocks.tolist())
        self._followers.tell(step)
        with self._together():
            return self._rank.prefill(step.tokens, step.blocks, on_layer)

    def decode(self, token: int, position: int, cache: PagedKvCache, blocks: Tensor) -> Tensor:
        """Takes a step like `LlamaModel.decode`."""
        del cache
        step = Decode(token, position, blocks.tolist())
        self._followers.tell(step)
        with self._together():
            return self._rank.decode(step.token, step.position, step.blocks)

    def pin(self, update_id: str) -> Staged:
        """Keeps an update that every rank has staged, to be applied.

        Raises NotStaged, with nothing pinned, if a rank has not staged it, and RankLost.
        """
        self._followers.tell(Pin(update_id))
        pinned: Staged | None = None
        refused = []
        try:
            pinned = self._rank.pin(update_id)
        except KvxferError as error:
            refused.append(f"rank 0: {error}")
        for rank, answer in enumerate(self._followers.gather(self._settings.apply_seconds), 1):
            if isinstance(answer, Refused):
                refused.append(f"rank {rank}: {answer.reason}")
            elif pinned and answer.staged and answer.staged.version != pinned.version:
                refused.append(
                    f"rank {rank}: it is version {answer.staged.version}, but {pinned.version} on "
                    "rank 0"
                )
        if pinned is None or refused:
            self.unpin()
            raise NotStaged(f"update {update_id} cannot be applied: {'; '.join(refused)}")
        return pinned

    def unpin(self) -> None:
        """Releases the pinned update, which will not be applied. Raises RankLost."""
        self._followers.tell(Unpin())
        self._rank.unpin()
        self._followers.gather(self._settings.apply_seconds)

    def apply(self, staged: Staged) -> int:
        """Has all ranks copy the weights that they have pinned, in place, and returns the version
        that is served from now on.

        Any failure ends all ranks: raises RankLost, or the error of rank 0.
        """
        self._followers.tell(Apply(staged))
        try:
            self._rank.apply(staged)
            self._followers.gather(self._settings.apply_seconds)
        except BaseException as error:
            self._followers.end(f"rank 0 failed: {type(error).__name__}: {error}")
            self._rank.broken(error)
            raise
        return self.weights_version

    def applied(self, staged: Staged, pause_seconds: float | None) -> None:
        """Reports to the sender, from each rank, that the update is served. Raises RankLost."""
        self._followers.tell(Applied(staged))
        self._rank.applied(staged, pause_seconds)
        self._followers.gather(self._settings.apply_seconds)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Ends all ranks if rank 0 fails: the others are in the middle of the same computation."""
        try:
            yield
        except RuntimeError as error:
            # The collective raises it if a rank has been lost.
            if self._spec.ranks == 1:
                raise
            raise self._followers.loss() from error
        except BaseException as error:
            self._followers.end(f"rank 0 failed: {type(error).__name__}: {error}")
            raise
