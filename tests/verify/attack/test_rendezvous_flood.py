"""Strangers flood the local socket, so a rendezvous there is not answered."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvxfer.engine import Engine
from kvxfer.errors import ConnectFailed
from verify.attack import wire
from verify.attack.fake_engine import FakeEngine
from verify.attack.hostile import Target, read
from verify.attack.worker import KEY

pytestmark = pytest.mark.native


async def test_engine_falls_back_to_tcp_if_the_local_socket_is_flooded() -> None:
    with contextlib.closing(FakeEngine(KEY)) as fake:
        async with Engine(cluster_key=KEY, fabrics=("local", "tcp"), peer_timeout=10) as engine:
            connecting = asyncio.create_task(engine.connect(fake.address, timeout=15))
            control = await asyncio.to_thread(fake.accept)
            rendezvous, _ = await asyncio.to_thread(fake.unix.accept)
            target = Target.of(engine.address)
            silent = [target.connect_local() for _ in range(600)]
            # The rendezvous is not answered; after half a second the engine dials lanes.
            lane, _ = await asyncio.to_thread(fake.listener.accept)
            hello = await asyncio.to_thread(read, lane, wire.HELLO_BYTES)
            assert hello[6] == wire.LANE
            # 256 are kept, and as many again if a busy machine has let the first ones time out.
            assert engine.refusals()["handshake"]["backpressure"] >= 600 - 2 * 256
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            for sock in (control, rendezvous, lane, *silent):
                sock.close()


async def test_if_sharing_memory_fails_and_there_is_no_other_fabric_the_error_says_why() -> None:
    with contextlib.closing(FakeEngine(KEY)) as fake:
        async with Engine(cluster_key=KEY, fabrics=("local",), peer_timeout=10) as engine:
            connecting = asyncio.create_task(engine.connect(fake.address, timeout=15))
            control = await asyncio.to_thread(fake.accept)
            rendezvous, _ = await asyncio.to_thread(fake.unix.accept)
            rendezvous.close()
            with pytest.raises(ConnectFailed, match=r"no common fabric.*; local failed: \w"):
                await connecting
            control.close()
