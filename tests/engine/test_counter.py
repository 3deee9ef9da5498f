"""Counters that run freely, and counters that call back."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer import Counter
from kvxfer.errors import (
    DeadlineExceeded,
    EngineClosed,
    InvalidArgument,
    ProtocolError,
    StaleCounter,
)
from tests.engine.conftest import Pair
from verify.polling import PATIENCE, eventually, wait_until

pytestmark = pytest.mark.native


async def told_of(counter: Counter, value: int) -> list[int]:
    """Subscribes to arrivals; returns all reported values once `value` was reported."""
    told: list[int] = []
    reached = asyncio.Event()

    def note(now: int) -> None:
        told.append(now)
        if now >= value:
            reached.set()

    counter.on_arrival(note)
    async with asyncio.timeout(PATIENCE):
        await reached.wait()
    return told


async def test_a_free_running_counter_is_waited_for_again_and_again(pair: Pair) -> None:
    counter = pair.reader.counter()
    for round_ in range(1, 6):
        for _ in range(2):
            pair.to_reader.write_imm(counter.imm)
        # The second immediate may have arrived already.
        await counter.wait_at_least(2 * round_ - 1, timeout=PATIENCE)
        await counter.wait_at_least(2 * round_, timeout=PATIENCE)
        assert counter.value == 2 * round_
        await counter.wait_at_least(1, timeout=PATIENCE)  # reached long before
    assert counter.completed_at_ns


async def test_waiting_for_at_least_ends_like_any_wait(pair: Pair) -> None:
    counter = pair.reader.counter()
    with pytest.raises(DeadlineExceeded, match="stands at 0 of 1"):
        await counter.wait_at_least(1, timeout=0.01)
    waiting = asyncio.create_task(counter.wait_at_least(1))
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="already"):
        await counter.wait_at_least(1)
    counter.release()
    with pytest.raises(StaleCounter):
        await waiting
    counter = pair.reader.counter()
    waiting = asyncio.create_task(counter.wait_at_least(1))
    await asyncio.sleep(0)
    await pair.reader.close()
    with pytest.raises(EngineClosed):
        await waiting


async def test_an_exact_wait_that_was_given_up_does_not_fail_a_later_one(pair: Pair) -> None:
    counter = pair.reader.counter()
    with pytest.raises(DeadlineExceeded):
        await counter.wait(1, timeout=0.001)
    group = [pair.to_reader.write_imm(counter.imm) for _ in range(3)]
    await counter.wait_at_least(3, timeout=PATIENCE)
    await asyncio.gather(*(asyncio.wait_for(write, PATIENCE) for write in group))
    assert counter.value == 3


async def test_the_completion_of_a_wait_that_was_given_up_does_not_end_the_next(
    pair: Pair,
) -> None:
    counter = pair.reader.counter()
    with pytest.raises(DeadlineExceeded):
        await counter.wait(1, timeout=0.001)
    group = [pair.to_reader.write_imm(counter.imm) for _ in range(3)]
    # The event loop is blocked, so it does not handle the old wait's completion meanwhile.
    wait_until(lambda: counter.value == 3)
    with pytest.raises(ProtocolError, match="stands at 3 immediates, but 2 were waited for"):
        await counter.wait(2, timeout=PATIENCE)
    await counter.wait(3, timeout=PATIENCE)
    await asyncio.gather(*(asyncio.wait_for(write, PATIENCE) for write in group))


async def test_arrivals_call_back_with_growing_values_up_to_the_last(pair: Pair) -> None:
    counter = pair.reader.counter()
    told = asyncio.create_task(told_of(counter, 500))
    for _ in range(500):
        pair.to_reader.write_imm(counter.imm)
        await asyncio.sleep(0)
    values = await told
    assert values == sorted(set(values))
    assert values[-1] == counter.value == 500


async def test_arrivals_before_the_subscription_are_in_the_first_call(pair: Pair) -> None:
    counter = pair.reader.counter()
    for _ in range(3):
        pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: counter.value == 3)
    assert await told_of(counter, 3) == [3]


async def test_a_failing_callback_is_logged_and_called_again(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    counter = pair.reader.counter()
    values: list[int] = []

    def fail(value: int) -> None:
        values.append(value)
        raise RuntimeError("a bug of the callback")

    counter.on_arrival(fail)
    pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: values == [1])
    pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: values == [1, 2])
    assert caplog.text.count("RuntimeError: a bug of the callback") == 2


async def test_a_released_counter_does_not_call_back(pair: Pair) -> None:
    counter, other = pair.reader.counter(), pair.reader.counter()
    values: list[int] = []
    pair.to_reader.write_imm(counter.imm)
    await eventually(lambda: counter.value == 1)
    counter.on_arrival(values.append)
    counter.release()
    await pair.to_reader.write_imm(other.imm)
    await other.wait(1, timeout=PATIENCE)
    assert values == []
    with pytest.raises(StaleCounter):
        counter.on_arrival(values.append)
