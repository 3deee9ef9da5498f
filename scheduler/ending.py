"""The end of a task that talks to Redis."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Final

_AGAIN_SECONDS: Final = 0.5


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits for its end. Raises any error that it ended with.

    Cancels again if need be: Python 3.11's wait_for, in the Redis client, may swallow a
    cancellation, and a task that loops would never end.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_SECONDS)
    with suppress(asyncio.CancelledError):
        await task
