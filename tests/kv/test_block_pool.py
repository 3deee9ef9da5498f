from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvxfer.errors import BlockPoolExhausted, BlockStateError, InvalidArgument
from kvxfer.kv.block_pool import TRANSITIONS, BlockHold, BlockLease, BlockPin, BlockPool, BlockState


def test_an_offer_goes_through_its_states_and_comes_back() -> None:
    pool = BlockPool(8)
    with pool.offer(3) as lease:
        ids = lease.ids.tolist()
        assert {pool.state(block) for block in ids} == {BlockState.OFFERED}
        lease.receive()
        assert {pool.state(block) for block in ids} == {BlockState.RECEIVING}
        lease.complete()
        assert {pool.state(block) for block in ids} == {BlockState.COMPLETE}
        hold = lease.take()
        assert hold.ids.tolist() == ids
    assert {pool.state(block) for block in ids} == {BlockState.HELD}
    hold.release()
    assert pool.counts()[BlockState.FREE] == 8
    pool.check()


@pytest.mark.parametrize("error", [MemoryError, SystemError])
@pytest.mark.parametrize("count_first", [True, False])
def test_blocks_come_back_if_memory_runs_out_at_their_release(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], count_first: bool
) -> None:
    pool = BlockPool(8)
    hold, lease = pool.hold(3), pool.offer(4)
    pin = hold.pin("reader")

    def exhausted(_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(np, "flatnonzero", exhausted)
        hold.release()
        lease.release()
        assert pool.num_free == 1
        pin.release()
        assert pool.num_free == 1
    if count_first:
        assert pool.num_free == 8
    pool.hold(8).release()
    pool.check()


def exhausted(_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("ask", [BlockPool.counts, lambda pool: pool.num_free])
def test_blocks_come_back_if_memory_runs_out_while_they_are_collected(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[BlockPool], object]
) -> None:
    pool = BlockPool(8)
    hold = pool.hold(3)

    with monkeypatch.context() as patched:
        patched.setattr(np, "flatnonzero", exhausted)
        hold.release()
        patched.setattr(BlockHold, "is_over", exhausted)
        ask(pool)
    assert pool.num_free == 8
    pool.check()


@pytest.mark.parametrize("failing", ["flatnonzero", "concatenate"])
def test_without_memory_no_block_leaves_the_pool(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    pool = BlockPool(8)
    hold = pool.hold(3)

    with monkeypatch.context() as patched:
        patched.setattr(np, failing, exhausted)
        for take in (pool.offer, pool.hold, hold.extend):
            with pytest.raises(MemoryError):
                take(2)
    assert pool.num_free == 5
    assert len(hold) == 3
    pool.check()
    hold.release()
    assert pool.num_free == 8


def test_a_fresh_pool_gives_out_ascending_runs() -> None:
    pool = BlockPool(8)
    assert pool.hold(3).ids.tolist() == [0, 1, 2]
    assert pool.hold(2).ids.tolist() == [3, 4]


def test_blocks_come_back_when_the_body_raises() -> None:
    pool = BlockPool(4)
    with pytest.raises(RuntimeError), pool.hold(2), pool.offer(2):
        raise RuntimeError
    assert pool.num_free == 4
    pool.check()


def test_the_error_of_an_exhausted_pool_says_who_has_the_blocks() -> None:
    pool = BlockPool(4)
    with pool.hold(2), pool.offer(1):
        with pytest.raises(BlockPoolExhausted) as caught:
            pool.offer(2)
        assert "2 blocks asked for, 1 of 4 are free" in str(caught.value)
        assert "1 offered" in str(caught.value)
        assert "2 held" in str(caught.value)
        assert pool.num_free == 1
        pool.check()


@pytest.mark.parametrize("count", [0, -1])
def test_no_blocks_cannot_be_asked_for(count: int) -> None:
    pool = BlockPool(4)
    with pytest.raises(InvalidArgument):
        pool.hold(count)
    with pytest.raises(InvalidArgument):
        BlockPool(count)
    with pytest.raises(InvalidArgument):
        pool.state(4)


def test_a_step_that_the_state_does_not_allow_names_block_state_and_remedy() -> None:
    pool = BlockPool(4)
    pool.hold(1)
    lease = pool.offer(2)
    with pytest.raises(BlockStateError) as caught:
        lease.complete()
    assert str(caught.value) == (
        "block 1 is offered and cannot become complete; "
        "wait until prefill accepts the offer, or release() the lease"
    )
    with pytest.raises(BlockStateError, match="block 1 is offered and cannot become held"):
        lease.take()
    lease.receive()
    with pytest.raises(BlockStateError, match="block 1 is receiving and cannot become receiving"):
        lease.receive()
    assert lease.block_state() is BlockState.RECEIVING
    pool.check()


def test_released_blocks_cannot_be_used_and_release_again_does_nothing() -> None:
    pool = BlockPool(4)
    lease, hold = pool.offer(1), pool.hold(1)
    for owner in (lease, hold):
        owner.release()
        owner.release()
        with pytest.raises(BlockStateError, match="owned here: it was released; take blocks"):
            _ = owner.ids
    with pytest.raises(BlockStateError):
        lease.receive()
    with pytest.raises(BlockStateError):
        hold.extend(1)
    with pytest.raises(BlockStateError):
        hold.pin("reader")
    assert pool.num_free == 4
    pool.check()


def test_blocks_that_were_taken_are_in_the_hold_that_has_them() -> None:
    pool = BlockPool(4)
    lease = pool.offer(1)
    lease.receive()
    lease.complete()
    with lease.take():
        with pytest.raises(BlockStateError, match=r"use the hold that it returned$"):
            lease.take()
        assert pool.num_free == 3
    pool.check()


def test_a_pinned_hold_comes_back_when_the_last_reader_is_gone() -> None:
    pool = BlockPool(4)
    hold = pool.hold(3)
    first, second = hold.pin("transfer a"), hold.pin("transfer b")
    assert sorted(hold.readers) == ["transfer a", "transfer b"]
    hold.release()
    assert pool.num_free == 1
    first.release()
    first.release()
    assert pool.num_free == 1
    pool.check()
    second.release()
    assert pool.num_free == 4
    pool.check()


def test_a_pin_that_ends_first_leaves_the_hold_alone() -> None:
    pool = BlockPool(2)
    hold = pool.hold(1)
    with hold.pin("reader"):
        pass
    assert hold.ids.tolist() == [0]
    assert pool.num_free == 1


def test_a_hold_grows() -> None:
    pool = BlockPool(4)
    hold = pool.hold(1)
    assert hold.extend(2).tolist() == [1, 2]
    assert hold.ids.tolist() == [0, 1, 2]
    with pytest.raises(BlockPoolExhausted):
        hold.extend(2)
    hold.release()
    assert pool.num_free == 4


def test_ids_are_read_only() -> None:
    ids = BlockPool(4).hold(2).ids
    assert ids.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 3


def test_check_finds_a_block_with_a_wrong_state() -> None:
    pool = BlockPool(4)
    hold = pool.hold(2)
    pool._state[1] = BlockState.RECEIVING
    with pytest.raises(BlockStateError, match="block 1 is receiving, its owner says held"):
        pool.check()
    pool._state[1] = BlockState.HELD
    pool._owners.discard(hold)
    with pytest.raises(BlockStateError, match="block 0 is in 0 places, not one"):
        pool.check()


def test_threads_never_share_a_block() -> None:
    pool = BlockPool(64)
    marks = np.zeros(64, dtype=np.int64)
    clashes: list[int] = []
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait()
        for turn in range(300):
            try:
                with pool.hold(1 + turn % 16) as hold:
                    marks[hold.ids] = thread
                    if (marks[hold.ids] != thread).any():
                        clashes.append(thread)
            except BlockPoolExhausted:
                continue

    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.num_free == 64
    pool.check()


SIZE = 12


class PoolMachine(RuleBasedStateMachine):
    """Keeps every block in exactly one place, in a state that the table allows, in any order of
    calls."""

    leases = Bundle("leases")
    holds = Bundle("holds")
    pins = Bundle("pins")

    @initialize()
    def make(self) -> None:
        self.pool = BlockPool(SIZE)
        self.before = [BlockState.FREE] * SIZE

    @rule(target=leases, count=st.integers(1, SIZE))
    def offer(self, count: int) -> object:
        free = self.pool.num_free
        try:
            lease = self.pool.offer(count)
        except BlockPoolExhausted:
            assert count > free
            return multiple()
        assert count <= free
        return lease

    @rule(target=holds, count=st.integers(1, SIZE))
    def hold(self, count: int) -> object:
        free = self.pool.num_free
        try:
            return self.pool.hold(count)
        except BlockPoolExhausted:
            assert count > free
            return multiple()

    @rule(lease=leases, step=st.sampled_from(["receive", "complete"]))
    def advance(self, lease: BlockLease, step: str) -> None:
        state, ended = lease.block_state(), lease._ended
        wanted = BlockState.OFFERED if step == "receive" else BlockState.RECEIVING
        try:
            getattr(lease, step)()
        except BlockStateError:
            assert ended or state is not wanted
        else:
            assert not ended
            assert state is wanted

    @rule(target=holds, lease=leases)
    def take(self, lease: BlockLease) -> object:
        allowed = not lease._ended and lease.block_state() is BlockState.COMPLETE
        try:
            hold = lease.take()
        except BlockStateError:
            assert not allowed
            return multiple()
        assert allowed
        return hold

    @rule(lease=consumes(leases))
    def release_lease(self, lease: BlockLease) -> None:
        lease.release()

    @rule(hold=holds)
    def release_hold(self, hold: BlockHold) -> None:
        hold.release()

    @rule(hold=holds, count=st.integers(1, 3))
    def extend(self, hold: BlockHold, count: int) -> None:
        free, ended = self.pool.num_free, hold._ended
        try:
            hold.extend(count)
        except BlockPoolExhausted:
            assert count > free
        except BlockStateError:
            assert ended

    @rule(target=pins, hold=holds)
    def pin(self, hold: BlockHold) -> object:
        ended = hold._ended
        try:
            return hold.pin("reader")
        except BlockStateError:
            assert ended
            return multiple()

    @rule(pin=pins)
    def unpin(self, pin: BlockPin) -> None:
        pin.release()

    @invariant()
    def every_block_is_in_one_place_and_came_there_by_the_table(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        now = [self.pool.state(block) for block in range(SIZE)]
        for before, after in zip(self.before, now, strict=True):
            assert before is after or after in TRANSITIONS[before]
        self.before = now


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockPoolMachine = PoolMachine.TestCase
