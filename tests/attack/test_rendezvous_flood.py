"""Silent strangers at the local socket do not take the place of a rendezvous under way."""

from __future__ import annotations

import asyncio
import contextlib

from kvxfer.engine import Engine

from . import wire
from .fake_engine import FakeEngine
from .hostile import Target, read
from .worker import KEY


async def test_engine_falls_back_to_tcp_though_its_local_socket_is_flooded() -> None:
    with contextlib.closing(FakeEngine(KEY)) as fake:
        async with Engine(cluster_key=KEY, fabrics=("local", "tcp"), peer_timeout=10) as engine:
            connecting = asyncio.create_task(engine.connect(fake.address, timeout=15))
            control = await asyncio.to_thread(fake.accept)
            rendezvous, _ = await asyncio.to_thread(fake.unix.accept)
            target = Target.of(engine.address)
            silent = [target.connect_local() for _ in range(300)]
            # The rendezvous is not answered: after half a second come the lanes.
            lane, _ = await asyncio.to_thread(fake.listener.accept)
            hello = await asyncio.to_thread(read, lane, wire.HELLO_BYTES)
            assert hello[6] == wire.LANE
            assert engine.refusals()["handshake"]["backpressure"] >= 300 - 256
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            for sock in (control, rendezvous, lane, *silent):
                sock.close()
