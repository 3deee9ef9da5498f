"""A thread for one call, which waits for no other call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Awaits a call that blocks. `asyncio.to_thread` has a few threads for the whole program: there
    the close of an engine, or a fence, would wait behind calls that a network does not answer."""
    executor = ThreadPoolExecutor(1, "kvxfer-call")
    try:
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)
