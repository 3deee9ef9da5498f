from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator

import pytest

from kvxfer.reference.compute import Abandon, Abandoned, ComputeThread

pytestmark = pytest.mark.native


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    thread.close()


async def test_computations_run_one_after_another_in_one_thread(compute: ComputeThread) -> None:
    running = threading.Lock()

    def computation(number: int) -> tuple[int, int]:
        assert running.acquire(blocking=False)
        running.release()
        return number, threading.get_ident()

    results = await asyncio.gather(
        *(compute.run(functools.partial(computation, number)) for number in range(20))
    )
    assert [number for number, _ in results] == list(range(20))
    assert len({thread for _, thread in results} - {threading.get_ident()}) == 1


async def test_an_error_reaches_the_caller(compute: ComputeThread) -> None:
    def fail() -> None:
        raise ValueError("out of numbers")

    with pytest.raises(ValueError, match="out of numbers"):
        await compute.run(fail)


async def test_a_cancelled_caller_returns_only_when_its_computation_has_ended(
    compute: ComputeThread,
) -> None:
    started, may_end = threading.Event(), threading.Event()
    ended = []

    def computation() -> None:
        started.set()
        may_end.wait()
        ended.append(True)

    task = asyncio.create_task(compute.run(computation))
    await asyncio.to_thread(started.wait)
    for _ in range(3):  # a second cancellation does not cut the computation short either
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_running_computation_learns_that_it_is_abandoned(compute: ComputeThread) -> None:
    started, told = threading.Event(), threading.Event()
    abandon = Abandon()

    def computation() -> None:
        started.set()
        while True:
            try:
                abandon.check()
            except Abandoned:
                told.set()
                raise

    task = asyncio.create_task(compute.run(computation, abandon))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert told.is_set()


async def test_a_queued_computation_of_a_cancelled_caller_never_runs(
    compute: ComputeThread,
) -> None:
    started, may_end = threading.Event(), threading.Event()
    ran = []

    def first() -> None:
        started.set()
        may_end.wait()

    running = asyncio.create_task(compute.run(first))
    await asyncio.to_thread(started.wait)
    queued = asyncio.create_task(compute.run(lambda: ran.append(True)))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    may_end.set()
    await running
    await compute.run(lambda: None)
    assert ran == []
