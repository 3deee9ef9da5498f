"""Waits for a condition, with a deadline. All tests and programs here wait with these functions."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import KvxferError

T = TypeVar("T")

PATIENCE: Final = 30.0
"""The time in seconds for events that happen at once on an idle machine."""

_PAUSE: Final = 0.02


async def eventually(
    step: Callable[[], T | Awaitable[T]], seconds: float = PATIENCE, *, pause: float = _PAUSE
) -> T:
    """Returns the answer of `step` once it is neither false nor a KvxferError.

    Raises TimeoutError after `seconds`, with the last error or answer as a note.
    """
    last: T | KvxferError | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    answer = step()
                    last = await answer if inspect.isawaitable(answer) else answer
                    if last:
                        return last
                except KvxferError as error:
                    last = error
                await asyncio.sleep(pause)
    except TimeoutError as error:
        error.add_note(f"after {seconds} s: {last!r}")
        raise


def wait_until(step: Callable[[], T], seconds: float = PATIENCE, *, pause: float = _PAUSE) -> T:
    """Does the same as eventually() for code without an event loop."""
    give_up = SYSTEM_CLOCK.monotonic() + seconds
    while True:
        last: T | KvxferError
        try:
            last = step()
            if last:
                return last
        except KvxferError as error:
            last = error
        if SYSTEM_CLOCK.monotonic() > give_up:
            raise TimeoutError(f"after {seconds} s: {last!r}")
        SYSTEM_CLOCK.sleep(pause)


async def turns(rng: random.Random, most: int) -> None:
    """Waits a random number of turns of the event loop, below `most`, so that an event may come at
    any moment."""
    for _ in range(rng.randrange(most)):
        await asyncio.sleep(0)
