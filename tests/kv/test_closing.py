"""An endpoint that closes while its peers are still to stop writing."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import PeerLost

from .pair import POOL, Pair


async def test_an_endpoint_has_closed_when_nothing_can_land_in_blocks_of_failed_sessions() -> None:
    """A lost peer's blocks are free only after NICs that place its bytes have stopped."""
    pair = Pair()
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        stopping = pair.decode.engine.revoking = []
        receiver = await pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 2)
        pair.deliver()
        pair.network.lose(PeerLost("the cable was pulled"))
        await asyncio.sleep(0)
        [stopped] = stopping
        closing = asyncio.create_task(pair.decode.endpoint.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        assert pair.decode.pool.num_free == POOL - 2
        stopped()
        await closing
        assert pair.decode.pool.num_free == POOL
        with pytest.raises(PeerLost):
            await receiver.wait()
