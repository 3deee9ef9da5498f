"""Waiting for a state that raises no event, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(holds: Callable[[], bool | Awaitable[bool]], *, seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            held = holds()
            if await held if inspect.isawaitable(held) else held:
                return
            await asyncio.sleep(0.01)
