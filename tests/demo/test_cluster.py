from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvxfer.child_process import Child
from kvxfer.demo.cluster import Cluster
from kvxfer.errors import PeerLost, ProcessFailed


class Process:
    """A stand-in for a child; it exits when told to."""

    def __init__(self) -> None:
        self.exited = asyncio.Event()

    async def fail_on_exit(self) -> None:
        await self.exited.wait()
        raise ProcessFailed("the decode worker was ended by SIGKILL")


def cluster_of(*processes: Process) -> Cluster:
    return Cluster("http://control", [cast(Child, process) for process in processes])


async def forever() -> Any:
    await asyncio.get_running_loop().create_future()


async def test_the_result_of_the_work_is_returned() -> None:
    async def work() -> int:
        return 7

    assert await cluster_of(Process(), Process()).run(work()) == 7


async def test_a_process_that_exits_ends_the_work() -> None:
    process = Process()
    working = asyncio.create_task(forever())
    running = asyncio.create_task(cluster_of(Process(), process).run(working))
    await asyncio.sleep(0)
    process.exited.set()
    with pytest.raises(ProcessFailed, match="SIGKILL"):
        await running
    assert working.cancelled()


async def test_an_error_is_blamed_on_the_process_that_died_of_it() -> None:
    process = Process()

    async def work() -> None:
        asyncio.get_running_loop().call_soon(process.exited.set)
        raise PeerLost("the connection is gone")

    with pytest.raises(ProcessFailed, match="SIGKILL"):
        await cluster_of(process).run(work())


async def test_an_error_while_all_processes_live_is_raised_itself() -> None:
    async def work() -> None:
        raise PeerLost("the connection is gone")

    with pytest.raises(PeerLost):
        await cluster_of(Process()).run(work())


async def test_cancelling_cancels_the_work() -> None:
    working = asyncio.create_task(forever())
    running = asyncio.create_task(cluster_of(Process()).run(working))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert working.cancelled()
