"""The blocks of a pool as the tables of several KV cache groups.

The layers of the last group have a sliding window: that group keeps only the last blocks of a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvxfer.kv.block_pool import BlockIds, BlockPin, BlockState
from kvxfer.kv.blocks import ABSENT
from kvxfer.layout import KvLayout


class Grouped:
    """A BlockLease or BlockHold with a row of blocks for each group."""

    def __init__(self, owner: Any, ids: BlockIds) -> None:
        self._owner = owner
        self.ids = ids

    def pin(self, reader: str) -> BlockPin:
        pin: BlockPin = self._owner.pin(reader)
        return pin

    def block_state(self) -> BlockState:
        state: BlockState = self._owner.block_state()
        return state

    def receive(self) -> None:
        self._owner.receive()

    def complete(self) -> None:
        self._owner.complete()

    def take(self) -> Grouped:
        return Grouped(self._owner.take(), self.ids)

    def release(self) -> None:
        self._owner.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def take(of: Callable[[int], Any], layout: KvLayout, blocks: int, window: int) -> Any:
    """Takes `blocks` blocks of a prompt with `pool.hold` or `pool.offer`, for every group."""
    if layout.num_groups == 1:
        return of(blocks)
    kept = min(window, blocks)
    owner = of(blocks + kept)
    table = np.full((layout.num_groups, blocks), ABSENT, np.int32)
    table[0] = owner.ids[:blocks]
    table[1, blocks - kept :] = owner.ids[blocks:]
    return Grouped(owner, table)
