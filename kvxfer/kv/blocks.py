"""Block tables, with a row of block ids for each KV cache group; and the protocols of blocks that
sessions use, from a BlockPool or from an engine's own allocator."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Protocol, Self

import numpy as np

from kvxfer.errors import InvalidArgument
from kvxfer.kv.block_pool import BlockIds, BlockState
from kvxfer.layout import KvLayout

ABSENT: Final = -1
"""The id of a block that its group does not have, as it is outside of a sliding window."""


def by_group(ids: BlockIds, layout: KvLayout) -> BlockIds:
    """Returns the same ids with a row for each group; a single row may have one dimension.

    Raises InvalidArgument if the layout has another number of groups.
    """
    table = np.atleast_2d(ids)
    if len(table) != layout.num_groups:
        raise InvalidArgument(
            f"a block table for {len(table)} KV cache groups of a cache with {layout.num_groups}; "
            "pass the blocks of each group"
        )
    return table


def pack_block_table(ids: BlockIds) -> bytes:
    """Returns a block table in its wire form: little-endian int32, row by row."""
    return ids.astype("<i4", copy=False).tobytes()


def unpack_block_table(table: bytes, num_blocks: int, layout: KvLayout) -> BlockIds:
    """Returns the block ids of a table of a pool of `num_blocks`, with a row for each group of the
    layout.

    Raises InvalidArgument for an empty or ragged table, an id outside the pool, an id that occurs
    twice, or a group without a block.
    """
    groups = layout.num_groups
    if not table or len(table) % (4 * groups):
        of = f" for each of {groups} KV cache groups" if groups > 1 else ""
        raise InvalidArgument(
            f"a block table of {len(table)} bytes; send 4 bytes for each of at least one block{of}"
        )
    ids = np.frombuffer(table, dtype="<i4").astype(np.int32, copy=False)
    present = ids[ids != ABSENT] if layout.layer_groups else ids
    outside = np.flatnonzero((present < 0) | (present >= num_blocks))
    if len(outside):
        raise InvalidArgument(
            f"block {int(present[outside[0]])} of the block table is outside the pool; "
            f"its blocks are 0 to {num_blocks - 1}"
        )
    unique, times = np.unique(present, return_counts=True)
    if len(unique) != len(present):
        raise InvalidArgument(
            f"block {int(unique[times > 1][0])} is in the block table {int(times.max())} times; "
            "a block receives one part of the cache only"
        )
    rows = ids.reshape(groups, -1)
    if (rows == ABSENT).all(axis=1).any():
        raise InvalidArgument("a block table without a block of one KV cache group; send some")
    return rows


class Pin(Protocol):
    """A claim that keeps blocks from being reused. `BlockPin` is one."""

    def release(self) -> None:
        """Ends the claim of this pin. May be called any number of times."""


class SourceBlocks(Protocol):
    """Blocks that prefill sends, in the order of the prompt. `BlockHold` is one."""

    @property
    def ids(self) -> BlockIds:
        """The block ids. A prompt that is computed in chunks may fill them in before they are
        sent."""

    def pin(self, reader: str) -> Pin:
        """Pins the blocks: their bytes may be read until the pin is released."""


class HeldBlocks(SourceBlocks, Protocol):
    """Blocks that an engine computes with; a context manager. `BlockHold` is one."""

    def release(self) -> None:
        """Gives the blocks back once no reader has them pinned."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...


class TargetBlocks(Protocol):
    """Blocks that decode receives into. `BlockLease` is one.

    A session calls receive(), complete() and take() in this order, or release() in place of any.
    """

    @property
    def ids(self) -> BlockIds:
        """The block ids in the order of the prompt."""

    def block_state(self) -> BlockState:
        """Returns OFFERED at first, RECEIVING after receive(), COMPLETE after complete()."""

    def receive(self) -> None:
        """Notes that prefill has accepted the offer."""

    def complete(self) -> None:
        """Notes that every write has arrived."""

    def take(self) -> HeldBlocks:
        """Hands the blocks over to the engine, which computes with them from now on."""

    def release(self) -> None:
        """Gives the blocks of a failed transfer back; no write can land in them any more."""
