"""Blocks of the engine's own allocator, in the place of those of a BlockPool."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from kvxfer.kv.block_pool import BlockIds, BlockState
from kvxfer.kv.blocks import ABSENT


class EngineBlocks:
    """Blocks of one request, by id, for a session of either side: a list of them, or a row for
    each KV cache group.

    The engine keeps them until the session has ended: it is told by `wait()` or `finish()` of the
    session, which return or raise when nothing can land in the blocks any more and nothing reads
    them any more. So nothing is given back here.
    """

    def __init__(self, ids: Sequence[int] | BlockIds | int, groups: int = 1) -> None:
        """Blocks that are known, or room for as many in each group as a prompt needs that is
        computed in chunks."""
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
        """Takes the first blocks of the prompt, as far as they are allocated. Any thread, before
        they are written."""
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
