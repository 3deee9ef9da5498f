"""Many calls of one client at once."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from kvxfer.client import ControlPlaneClient
from kvxfer.errors import ControlPlaneUnavailable, UnknownTransfer
from kvxfer.instances import InstanceState
from tests.control_plane import RunningControlPlane, worker
from verify.polling import PATIENCE, eventually


class Slow(httpx.AsyncBaseTransport):
    """Answers when it is let, and knows how many wait for that."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.waiting = self.most = 0

    async def wait_for(self, calls: int) -> None:
        await eventually(lambda: self.waiting >= calls)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.let.wait()
        self.waiting -= 1
        return httpx.Response(200, json={"instances": []})


async def test_calls_take_turns() -> None:
    slow = Slow()
    async with ControlPlaneClient("http://h:1", transport=slow) as client:
        calls = [asyncio.create_task(client.instances()) for _ in range(400)]
        await slow.wait_for(32)
        slow.let.set()
        assert await asyncio.gather(*calls) == [()] * 400
    assert slow.most == 32


async def test_a_call_whose_turn_does_not_come_in_time_was_not_carried_out() -> None:
    slow = Slow()
    async with ControlPlaneClient("http://h:1", transport=slow, deadline=0) as client:
        calls = [asyncio.create_task(client.instances()) for _ in range(32)]
        await slow.wait_for(32)
        client._timeout = 0.01
        with pytest.raises(ControlPlaneUnavailable, match="32 calls were under way"):
            await client.open_transfer()
        slow.let.set()
        await asyncio.gather(*calls)
        assert slow.waiting == 0
        client._timeout = 5.0
        assert await client.instances() == ()


async def test_calls_that_the_control_plane_keeps_waiting_hold_up_no_other() -> None:
    with RunningControlPlane(lease_seconds=600) as server:
        async with ControlPlaneClient(
            server.url, timeout=PATIENCE, deadline=2 * PATIENCE
        ) as client:
            leases = [
                await client.register(worker(name, role), state=InstanceState.READY)
                for name, role in (("p", "prefill"), ("d", "decode"))
            ]
            transfer = await client.open_transfer()
            waits = [
                asyncio.create_task(client.block_table(transfer.transfer_id, wait_seconds=30))
                for _ in range(120)
            ]
            await asyncio.sleep(0)
            assert (await client.heartbeat("p", leases[0].epoch)).epoch == leases[0].epoch
            assert not any(wait.done() for wait in waits)
            await client.release_transfer(transfer.transfer_id)
            for ended in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(ended, UnknownTransfer)
