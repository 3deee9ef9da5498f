"""Many calls of one client at once."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from kvxfer.client import ControlPlaneClient
from kvxfer.errors import ControlPlaneUnavailable, UnknownTransfer
from kvxfer.instances import InstanceState
from tests.network import Network
from tests.virtual_time import VirtualClock, passes
from verify.processes.control_plane import worker


class Slow(httpx2.AsyncBaseTransport):
    """A transport that answers when `let` is set, and counts the waiting requests."""

    def __init__(self) -> None:
        self.let = asyncio.Event()
        self.waiting = self.most = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.let.wait()
        self.waiting -= 1
        return httpx2.Response(200, json={"instances": []})


async def test_calls_beyond_32_take_turns(clock: VirtualClock) -> None:
    slow = Slow()
    async with ControlPlaneClient("http://h:1", transport=slow, clock=clock) as client:
        calls = [asyncio.create_task(client.instances()) for _ in range(400)]
        await passes(4)
        assert slow.waiting == 32
        slow.let.set()
        assert await asyncio.gather(*calls) == [()] * 400
    assert slow.most == 32


async def test_a_call_whose_turn_does_not_come_in_time_was_not_carried_out(
    clock: VirtualClock,
) -> None:
    slow = Slow()
    async with ControlPlaneClient("http://h:1", transport=slow, deadline=0, clock=clock) as client:
        calls = [asyncio.create_task(client.instances()) for _ in range(32)]
        await passes(0.1)
        asked = clock.monotonic()
        with pytest.raises(ControlPlaneUnavailable, match="32 calls were under way"):
            await client.open_transfer()
        assert clock.monotonic() - asked == pytest.approx(5)
        assert slow.waiting == 32
        slow.let.set()
        await asyncio.gather(*calls)
        assert slow.waiting == 0
        assert await client.instances() == ()


async def test_calls_that_the_control_plane_keeps_waiting_do_not_delay_others(
    network: Network, clock: VirtualClock
) -> None:
    async with network.control_plane(lease_seconds=600), network.client(deadline=60) as client:
        leases = [
            await client.register(worker(name, role), state=InstanceState.READY)
            for name, role in (("p", "prefill"), ("d", "decode"))
        ]
        transfer = await client.open_transfer()
        waits = [
            asyncio.create_task(client.block_table(transfer.transfer_id, wait_seconds=30))
            for _ in range(120)
        ]
        await passes(20)
        asked = clock.monotonic()
        assert (await client.heartbeat("p", leases[0].epoch)).epoch == leases[0].epoch
        assert clock.monotonic() == asked
        assert not any(wait.done() for wait in waits)
        await client.release_transfer(transfer.transfer_id)
        for ended in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(ended, UnknownTransfer)
        assert clock.monotonic() == asked
