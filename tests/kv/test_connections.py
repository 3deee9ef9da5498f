from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import ConnectFailed, DeadlineExceeded
from kvxfer.layout import KvLayout

from .steered import Engine, Network
from .test_interleavings import Side
from .test_outbox import Heard

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_size=4, dtype="uint8", block_size=1)


@pytest.mark.parametrize("turns", range(6))
async def test_meeting_a_peer_can_be_cancelled_even_if_its_hello_has_just_come(turns: int) -> None:
    prefill, decode = Side("prefill", LAYOUT), Side("decode", LAYOUT)
    network = Network(prefill.engine, decode.engine)
    async with prefill.endpoint, decode.endpoint:
        meeting = asyncio.create_task(decode.endpoint._connections.meet("kvx://prefill"))
        while not network.messages["decode"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        network._deliver_message("decode")
        for _ in range(turns):
            await asyncio.sleep(0)
        if meeting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await meeting


async def test_an_engine_without_a_kv_endpoint_is_named() -> None:
    decode, bare = Side("decode", LAYOUT), Engine("bare")
    bare.handler = Heard()
    Network(decode.engine, bare)
    async with decode.endpoint:
        with pytest.raises(DeadlineExceeded, match=r"did not introduce a KV cache within 2 s"):
            await decode.endpoint._connections.meet("kvx://bare")


async def test_an_address_that_names_no_engine_is_refused() -> None:
    decode = Side("decode", LAYOUT)
    Network(decode.engine, Engine("other"))
    async with decode.endpoint:
        with pytest.raises(ConnectFailed, match="names no engine"):
            await decode.endpoint._connections.meet("kvx://127.0.0.1:9/" + "0" * 32)
