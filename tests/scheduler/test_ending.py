from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvxfer.scheduler.ending import end
from tests.virtual_time import passes


async def test_a_task_that_swallows_a_cancellation_ends_too():
    swallowed = 0

    async def loops() -> None:
        nonlocal swallowed
        with suppress(asyncio.CancelledError):
            await passes(3600)
        swallowed += 1
        await passes(3600)

    task = asyncio.create_task(loops())
    await passes(1)
    await end(task)
    assert task.cancelled()
    assert swallowed == 1


async def test_the_error_of_a_failed_task_is_raised():
    async def fails() -> None:
        raise ValueError("broken")

    task = asyncio.create_task(fails())
    await passes(1)
    with pytest.raises(ValueError, match="broken"):
        await end(task)


async def test_a_task_that_has_ended_is_left_alone():
    async def answers() -> str:
        return "answer"

    task = asyncio.create_task(answers())
    await task
    await end(task)
    assert task.result() == "answer"
