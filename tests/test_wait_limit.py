"""A limit for many short waits that sets one timer."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.web.wait_limit import WaitLimit
from tests.virtual_time import VirtualClock, passes


async def wait(limit: WaitLimit, seconds: float) -> float:
    limit.begin()
    await passes(seconds)
    return limit.end()


async def test_many_waits_within_the_limit_end_nothing(clock: VirtualClock) -> None:
    async with WaitLimit(1) as limit:
        for _ in range(10):
            assert await wait(limit, 0.9) == pytest.approx(0.9)
            await passes(5)  # the time between two waits does not count
    assert not limit.expired


@pytest.mark.parametrize("before", [0, 0.3, 0.9, 2.5])
async def test_the_first_wait_that_is_too_long_ends_the_block_in_time(
    clock: VirtualClock, before: float
) -> None:
    limit = WaitLimit(1)
    with pytest.raises(TimeoutError):
        async with limit:
            for _ in range(3):
                await wait(limit, 0.2)
            await passes(before)
            began = clock.monotonic()
            await wait(limit, 1.5)
    assert clock.monotonic() - began == pytest.approx(1)
    assert limit.expired


async def test_a_cancelled_block_is_cancelled(clock: VirtualClock) -> None:
    limit = WaitLimit(1)

    async def block() -> None:
        async with limit:
            limit.begin()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await passes(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await passes(2)
    assert not limit.expired


async def test_without_seconds_it_waits_for_ever(clock: VirtualClock) -> None:
    async with WaitLimit(None) as limit:
        assert await wait(limit, 1e4) == pytest.approx(1e4)
