"""The block pool: the only place that gives KV blocks out or takes them back.

Blocks leave the pool inside an owner, a BlockLease (decode: offered to a prefill worker, which
may write to them) or a BlockHold (an engine computes with them), and come back only through it.
Every class here may be used from any thread.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import numpy as np

from kvxfer.errors import BlockPoolExhausted, BlockStateError, InvalidArgument

if TYPE_CHECKING:
    from typing import Self

BlockIds: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
"""Block ids, int32: [blocks], or [KV cache groups, blocks] if the ids differ by group."""


class BlockState(enum.IntEnum):
    """The use of a block. A peer may write only into OFFERED and RECEIVING blocks.

    FREE blocks belong to the pool, OFFERED ones to a decode session whose OFFER is not accepted
    yet, RECEIVING ones to a transfer under way. COMPLETE ones have every byte and wait for
    `take()`. HELD ones belong to a BlockHold: to an engine that computes with them, or to a prefill
    session that sends them.
    """

    FREE = 0
    OFFERED = 1
    RECEIVING = 2
    COMPLETE = 3
    HELD = 4


TRANSITIONS: Final[Mapping[BlockState, frozenset[BlockState]]] = {
    BlockState.FREE: frozenset({BlockState.OFFERED, BlockState.HELD}),
    BlockState.OFFERED: frozenset({BlockState.RECEIVING, BlockState.FREE}),
    BlockState.RECEIVING: frozenset({BlockState.COMPLETE, BlockState.FREE}),
    BlockState.COMPLETE: frozenset({BlockState.HELD, BlockState.FREE}),
    BlockState.HELD: frozenset({BlockState.FREE}),
}

_REMEDY: Final[Mapping[BlockState, str]] = {
    BlockState.FREE: "take blocks out of the pool with offer() or hold() first",
    BlockState.OFFERED: "wait until prefill accepts the offer, or release() the lease",
    BlockState.RECEIVING: "wait until every write has arrived, or release() the lease",
    BlockState.COMPLETE: "take() the blocks, or release() the lease",
    BlockState.HELD: "release() the hold first",
}

_RELEASED: Final = f"it was released; {_REMEDY[BlockState.FREE]}"
_TAKEN: Final = "take() has handed it over; use the hold that it returned"

# _ALLOWED[from, to], so that one lookup checks any number of blocks.
_ALLOWED: Final = np.array(
    [[to in TRANSITIONS[state] for to in BlockState] for state in BlockState], dtype=np.bool_
)


_NONE: Final[BlockIds] = np.empty(0, np.int32)

_OwnerT = TypeVar("_OwnerT", bound="BlockLease | BlockHold")


class BlockPool:
    """The states of `num_blocks` KV blocks, numbered from 0. Any thread.

    It gives blocks out by `hold()`, to compute with them, and by `offer()`, to receive into them.
    They go back through the hold or lease that has them, at the latest when that is left as a
    context manager; `check()` finds a block that has no owner or two. An engine that has an
    allocator needs no pool: it passes its blocks to the sessions of a KvEndpoint.

    Raises InvalidArgument for less than one block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidArgument(f"BlockPool of {num_blocks} blocks; give it at least 1")
        self._lock = threading.RLock()
        self._state = np.full(num_blocks, BlockState.FREE, dtype=np.uint8)
        # A stack with block 0 on top: a fresh pool gives out ascending runs, which coalesce.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._owners: set[BlockLease | BlockHold] = set()
        self._overdue = False  # some owners have ended, and their blocks are not back yet

    @property
    def num_blocks(self) -> int:
        """Blocks in all states."""
        return len(self._state)

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        if self._overdue:
            with self._lock:
                self._collect()
        return self._num_free

    def counts(self) -> dict[BlockState, int]:
        """Returns the number of blocks in each state."""
        with self._lock:
            self._collect()
            counts = np.bincount(self._state, minlength=len(BlockState))
        return {state: int(counts[state]) for state in BlockState}

    def state(self, block: int) -> BlockState:
        """Returns the state of one block. Raises InvalidArgument for an id outside the pool."""
        if not 0 <= block < self.num_blocks:
            raise InvalidArgument(
                f"block {block} is outside the pool; its blocks are 0 to {self.num_blocks - 1}"
            )
        return BlockState(int(self._state[block]))

    def offer(self, count: int) -> BlockLease:
        """Takes `count` free blocks to offer them to a prefill worker.

        Raises BlockPoolExhausted.
        """
        with self._lock:
            return self._give(BlockLease(self), count, BlockState.OFFERED)

    def hold(self, count: int) -> BlockHold:
        """Takes `count` free blocks to compute with them. Raises BlockPoolExhausted."""
        with self._lock:
            return self._give(BlockHold(self), count, BlockState.HELD)

    def check(self) -> None:
        """Raises BlockStateError unless every block is free or has exactly one owner."""
        with self._lock:
            self._collect()
            owned = [owner.block_ids() for owner in self._owners]
            everywhere = np.concatenate([self._free[: self._num_free], *owned])
            times = np.bincount(everywhere, minlength=self.num_blocks)
            if len(times) != self.num_blocks or (times != 1).any():
                block = int(np.flatnonzero(times != 1)[0])
                raise BlockStateError(
                    f"block {block} is in {int(times[block])} places, not one; "
                    "blocks may only go back through their own lease or hold"
                )
            for ids, state in [
                (self._free[: self._num_free], BlockState.FREE),
                *((owner.block_ids(), owner.block_state()) for owner in self._owners),
            ]:
                self._require(ids, state)

    def _give(self, owner: _OwnerT, count: int, to: BlockState) -> _OwnerT:
        """Gives an owner `count` more blocks. The owner is registered before it has them, so that
        a lack of memory leaves it without blocks."""
        self._owners.add(owner)
        try:
            owner._ids = self._pop(count, to, owner._ids)
        finally:
            if not len(owner):
                self._owners.discard(owner)
        return owner

    def _pop(self, count: int, to: BlockState, owned: BlockIds) -> BlockIds:
        """Returns `owned` followed by `count` free blocks, whose state is now `to`."""
        if count < 1:
            raise InvalidArgument(f"{count} blocks asked for; ask for at least 1")
        self._collect()
        if count > self._num_free:
            counts = self.counts()
            used = ", ".join(f"{counts[s]} {s.name.lower()}" for s in BlockState if s)
            raise BlockPoolExhausted(
                f"{count} blocks asked for, {self._num_free} of {self.num_blocks} are free "
                f"({used}); release blocks, or give the pool more"
            )
        left = self._num_free - count
        ids = np.concatenate([owned, self._free[left : self._num_free][::-1]])
        ids.setflags(write=False)
        self._move(ids[len(owned) :], to)
        self._num_free = left
        return ids

    def _push(self, ids: BlockIds) -> None:
        top = self._num_free + len(ids)
        self._free[self._num_free : top] = ids[::-1]
        self._move(ids, BlockState.FREE)
        self._num_free = top

    def _take_back(self, owner: BlockLease | BlockHold) -> None:
        """Takes back the blocks of an owner that has ended. If there is no memory for that, which
        numpy may also report as a SystemError, they come back with the next request for blocks or
        their number."""
        try:
            self._push(owner.block_ids())
        except (MemoryError, SystemError):
            self._overdue = True
        else:
            self._owners.discard(owner)

    def _collect(self) -> None:
        if not self._overdue:
            return
        # If there is no memory for this, the next request tries again.
        with contextlib.suppress(MemoryError):
            for owner in [owner for owner in self._owners if owner.is_over()]:
                self._take_back(owner)
            self._overdue = any(owner.is_over() for owner in self._owners)

    def _move(self, ids: BlockIds, to: BlockState) -> None:
        refused = np.flatnonzero(~_ALLOWED[self._state[ids], to])
        if len(refused):
            block = int(ids[refused[0]])
            state = BlockState(int(self._state[block]))
            raise BlockStateError(
                f"block {block} is {state.name.lower()} and cannot become {to.name.lower()}; "
                f"{_REMEDY[state]}"
            )
        self._state[ids] = to

    def _require(self, ids: BlockIds, state: BlockState) -> None:
        wrong = np.flatnonzero(self._state[ids] != state)
        if len(wrong):
            block = int(ids[wrong[0]])
            actual = BlockState(int(self._state[block]))
            raise BlockStateError(
                f"block {block} is {actual.name.lower()}, its owner says {state.name.lower()}; "
                f"{_REMEDY[actual]}"
            )


class _Owner(ABC):
    """Blocks outside the pool. Leaving the `with` block, or release(), gives them back once."""

    def __init__(self, pool: BlockPool, ids: BlockIds = _NONE) -> None:
        self._pool = pool
        self._ids = ids
        self._ended = False
        self._end = _RELEASED

    @property
    def ids(self) -> BlockIds:
        """Block ids, read-only int32. Raises BlockStateError once they are released or taken."""
        with self._pool._lock:
            self._require_live()
            return self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @abstractmethod
    def release(self) -> None:
        """Gives the blocks back."""

    def is_over(self) -> bool:
        """Whether its blocks have to go back to the pool."""
        return self._ended

    def block_ids(self) -> BlockIds:
        """Returns the ids, whether or not the owner was released."""
        return self._ids

    def _require_live(self) -> None:
        if self._ended:
            raise BlockStateError(f"block {int(self._ids[0])} is no longer owned here: {self._end}")


class BlockLease(_Owner):
    """Blocks that a prefill worker was offered: offered → receiving → complete → held."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._state = BlockState.OFFERED

    def block_state(self) -> BlockState:
        return self._state

    def receive(self) -> None:
        """Moves from offered to receiving: prefill has accepted the offer."""
        self._advance(BlockState.RECEIVING)

    def complete(self) -> None:
        """Moves from receiving to complete: every write has arrived."""
        self._advance(BlockState.COMPLETE)

    def take(self) -> BlockHold:
        """Moves from complete to held: hands the blocks over to the returned hold."""
        with self._pool._lock:
            self._advance(BlockState.HELD)
            hold = BlockHold(self._pool, self._ids)
            self._pool._owners.add(hold)
            self._ended = True
            self._end = _TAKEN
            self._pool._owners.discard(self)
            return hold

    def release(self) -> None:
        """Gives the blocks back, from any state. The caller makes sure that no write can come.

        Does nothing after the first time, or after take().
        """
        with self._pool._lock:
            if not self._ended:
                self._ended = True
                self._pool._take_back(self)

    def _advance(self, to: BlockState) -> None:
        with self._pool._lock:
            self._require_live()
            self._pool._move(self._ids, to)
            self._state = to


class BlockHold(_Owner):
    """Blocks that an engine computes with.

    A session that still reads them pins them: then release() takes effect when the last pin is
    released, so that no page is reused while bytes of it are under way.
    """

    def __init__(self, pool: BlockPool, ids: BlockIds = _NONE) -> None:
        super().__init__(pool, ids)
        self._pins: set[BlockPin] = set()

    def block_state(self) -> BlockState:
        return BlockState.HELD

    def is_over(self) -> bool:
        return self._ended and not self._pins

    def extend(self, count: int) -> BlockIds:
        """Takes `count` more free blocks into this hold and returns their ids.

        Raises BlockPoolExhausted.
        """
        with self._pool._lock:
            self._require_live()
            self._pool._give(self, count, BlockState.HELD)
            return self._ids[-count:]

    def pin(self, reader: str) -> BlockPin:
        """Keeps the blocks from being reused until the pin is released; `reader` names the reader.

        Raises BlockStateError if the hold was released.
        """
        with self._pool._lock:
            self._require_live()
            pin = BlockPin(self, reader)
            self._pins.add(pin)
            return pin

    @property
    def readers(self) -> tuple[str, ...]:
        """The readers that pin the blocks."""
        with self._pool._lock:
            return tuple(pin.reader for pin in self._pins)

    def release(self) -> None:
        """Gives the blocks back, now or when the last pin is released. Later calls do nothing."""
        with self._pool._lock:
            if not self._ended:
                self._ended = True
                self._return_unpinned()

    def _unpin(self, pin: BlockPin) -> None:
        with self._pool._lock:
            if pin in self._pins:
                self._pins.remove(pin)
                self._return_unpinned()

    def _return_unpinned(self) -> None:
        if self.is_over():
            self._pool._take_back(self)


class BlockPin:
    """A reader's claim on a hold; a context manager. release() more than once does nothing."""

    def __init__(self, hold: BlockHold, reader: str) -> None:
        self._hold = hold
        self.reader = reader

    def release(self) -> None:
        self._hold._unpin(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
