"""Processes of the demo: how they become ready, fail, and end."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kvxfer import child_process
from kvxfer.child_process import Child
from kvxfer.errors import ProcessFailed

pytestmark = pytest.mark.native

KEY = {"KVXFER_CLUSTER_KEY": "0123456789abcdef0123456789abcdef"}
SERVE = ["serve", "--port", "0", "--json"]


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_a_child_says_where_it_listens_and_ends_with_its_block() -> None:
    async with Child("control plane", SERVE, KEY) as child:
        assert (await child.ready(60))["url"].startswith("http://127.0.0.1:")
        pid = child.pid
        assert not ended(pid)
    assert ended(pid)


async def test_a_child_that_refuses_to_start_fails_with_its_error() -> None:
    async with Child("control plane", SERVE, {"KVXFER_CLUSTER_KEY": "short"}) as child:
        with pytest.raises(ProcessFailed) as failed:
            await child.ready(60)
    error = "the control plane exited with code 1: the cluster key has 5 bytes"
    assert str(failed.value).startswith(error)
    assert str(failed.value).endswith("[invalid-argument]")


async def test_a_child_that_breaks_fails_with_the_end_of_its_stderr() -> None:
    async with Child("control plane", ["serve", "--no-such-option"], KEY) as child:
        with pytest.raises(ProcessFailed, match=r"exited with code 2: .*no-such-option") as failed:
            await child.ready(60)
    assert "\n" not in str(failed.value)


async def test_a_child_that_is_not_ready_in_time_fails_and_is_ended() -> None:
    # The worker waits for a control plane that does not answer.
    arguments = ["worker", "--role", "decode", "--control-plane", "http://127.0.0.1:1", "--json"]
    async with Child("decode worker", arguments, KEY) as child:
        with pytest.raises(ProcessFailed, match=r"the decode worker was not ready within 0.05 s"):
            await child.ready(0.05)
        pid = child.pid
    assert ended(pid)


async def test_a_killed_child_is_reported_with_the_signal() -> None:
    async with Child("control plane", SERVE, KEY) as child:
        await child.ready(60)
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="the control plane was ended by SIGKILL"):
            await child.fail_on_exit()


async def test_a_child_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_STOP_SECONDS", 0.1)
    async with Child("control plane", SERVE, KEY) as child:
        await child.ready(60)
        os.kill(child.pid, signal.SIGSTOP)
        pid = child.pid
    assert ended(pid)


async def test_a_cancelled_block_still_ends_its_child() -> None:
    started = asyncio.Event()
    pids = []

    async def use() -> None:
        async with Child("control plane", SERVE, KEY) as child:
            pids.append(child.pid)
            started.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(use())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended(pids[0])
