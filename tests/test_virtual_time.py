"""The tests' own clock and loop: time passes at once, in order, and only when nothing is due."""

from __future__ import annotations

import asyncio
import threading

import pytest
from anyio import to_thread

from tests.virtual_time import NothingLeftToDo, VirtualLoop, passes


def run(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


async def test_timers_run_in_order_and_at_their_time(clock):
    began, seen = clock.monotonic(), []

    async def after(seconds: float) -> None:
        await passes(seconds)
        seen.append((seconds, clock.monotonic() - began))

    await asyncio.gather(after(3600), after(0.5), after(60))
    assert seen == [(0.5, 0.5), (60, 60), (3600, 3600)]


@pytest.mark.parametrize("of", ["asyncio", "anyio"])
async def test_time_stands_still_while_a_thread_works(clock, of):
    began, goes_on = clock.monotonic(), threading.Event()
    running = asyncio.get_running_loop()
    running.call_later(3600, goes_on.set)

    def work() -> float:
        # The loop has nothing else to do: without the thread, an hour would pass at once.
        running.call_soon_threadsafe(running.call_soon, goes_on.set)
        goes_on.wait()
        return clock.monotonic()

    in_thread = asyncio.to_thread if of == "asyncio" else to_thread.run_sync
    assert await in_thread(work) == began
    assert clock.monotonic() == began
    await passes(1)
    assert clock.monotonic() == began + 1


def test_a_wait_for_nothing_ends_the_test():
    async def waits() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingLeftToDo, match="no timer"):
        run(waits)


def test_a_wait_for_nothing_ends_despite_repeating_timers():
    async def waits() -> None:
        async def repeats() -> None:
            while True:
                await passes(60)

        task = asyncio.create_task(repeats())
        await asyncio.Event().wait()
        task.cancel()

    with pytest.raises(NothingLeftToDo, match="repeating timers"):
        run(waits)


def test_no_time_passes_on_a_real_loop():
    with pytest.raises(AssertionError, match="only virtual time"):
        asyncio.run(passes(1))


def test_a_virtual_test_opens_no_socket():
    async def listens() -> None:
        await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)

    with pytest.raises(AssertionError, match="native or realtime"):
        run(listens)
