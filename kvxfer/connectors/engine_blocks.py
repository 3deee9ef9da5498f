"""Blocks from the inference engine's own allocator, instead of a BlockPool."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from kvxfer.kv.block_pool import BlockIds, BlockState
from kvxfer.kv.blocks import ABSENT


class EngineBlocks:
    """The block ids of one request, for a session of either side: a list of them, or a row for
    each KV cache group.

    The inference engine keeps the blocks until the session's `wait()` or `finish()` returns or
    raises: from then on nothing lands in the blocks or reads them. So this class frees nothing.
    """

    def __init__(self, ids: Sequence[int] | BlockIds | int, groups: int = 1) -> None:
        """Takes the known block ids, or the number of blocks in each group to reserve for a prompt
        that is computed in chunks."""
        self._ids: BlockIds = (
            np.full((groups, ids), ABSENT, dtype=np.int32)
            if isinstance(ids, int)
            else np.array(ids, dtype=np.int32)
        )
        self._state = BlockState.OFFERED

    @property
    def ids(self) -> BlockIds:
        return self._ids

    def __len__(self) -> int:
        return self._ids.shape[-1]

    def fill(self, ids: Sequence[int] | BlockIds) -> None:
        """Sets the ids of the prompt's first blocks, as far as they are allocated. Any thread,
        before the blocks are written."""
        known = np.asarray(ids, dtype=np.int32)[..., : len(self)]
        self._ids[..., : known.shape[-1]] = known

    def pin(self, reader: str) -> Self:  # noqa: ARG002 (the engine waits for the session)
        return self

    def block_state(self) -> BlockState:
        return self._state

    def receive(self) -> None:
        self._state = BlockState.RECEIVING

    def complete(self) -> None:
        self._state = BlockState.COMPLETE

    def take(self) -> Self:
        self._state = BlockState.HELD
        return self

    def release(self) -> None:
        self._state = BlockState.FREE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
