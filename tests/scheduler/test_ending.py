from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvxfer.scheduler.ending import end


async def test_a_task_that_swallows_a_cancellation_ends_too():
    swallowed = 0

    async def loops() -> None:
        nonlocal swallowed
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        swallowed += 1
        await asyncio.sleep(3600)

    task = asyncio.create_task(loops())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 1


async def test_what_a_task_failed_with_is_raised():
    async def fails() -> None:
        raise ValueError("broken")

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="broken"):
        await end(task)


async def test_a_task_that_has_ended_is_left_alone():
    task = asyncio.create_task(asyncio.sleep(0, "answer"))
    await task
    await end(task)
    assert task.result() == "answer"
