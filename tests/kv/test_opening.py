"""The opening, cancelling and taking of sessions: what a caller may write, and what fails."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvxfer.errors import BlockStateError, TicketInvalid, TransferCancelled

from .pair import POOL, Pair
from .workers import LAYERS


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        yield pair
        await pair.settle()
        assert pair.prefill.endpoint.running() == {"send": 0, "receive": 0}
        assert pair.decode.endpoint.running() == {"send": 0, "receive": 0}
        assert (pair.prefill.pool.num_free, pair.decode.pool.num_free) == (POOL, POOL)


def decoding(pair: Pair) -> Any:
    return pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 2)


async def transfer(pair: Pair, sender: Any) -> None:
    for layer in range(LAYERS):
        sender.write_layer(layer)
    finishing = asyncio.create_task(sender.finish())
    while not finishing.done():
        await pair.settle()
    await finishing
    await pair.settle()


async def test_a_session_can_be_entered_without_await(pair: Pair) -> None:
    with pair.prefill.pool.hold(2) as hold:
        async with (
            decoding(pair) as receiver,
            pair.prefill.endpoint.prefill_session(pair.token, hold) as sender,
        ):
            await transfer(pair, sender)
            await receiver.wait()
            receiver.take().release()


async def test_a_session_that_is_entered_is_left_when_its_block_ends(pair: Pair) -> None:
    with pytest.raises(ZeroDivisionError):
        async with decoding(pair) as receiver:
            assert pair.decode.pool.num_free == POOL - 2
            raise ZeroDivisionError
    assert pair.decode.pool.num_free == POOL
    with pytest.raises(TransferCancelled, match="its session was left by ZeroDivisionError"):
        await receiver.wait()


async def test_what_prevents_a_session_is_raised_where_it_is_entered(pair: Pair) -> None:
    with pytest.raises(TicketInvalid):
        async with pair.decode.endpoint.decode_session("no ticket", "kvx://prefill", 2):
            pytest.fail("it was entered")


async def test_a_session_is_awaited_in_a_task_too(pair: Pair) -> None:
    async with await asyncio.create_task(decoding(pair)) as receiver:
        assert receiver.transfer_id == "t"


async def test_python_warns_of_a_session_that_is_neither_awaited_nor_entered(pair: Pair) -> None:
    with pytest.warns(RuntimeWarning, match=r"KvEndpoint\.decode_session' was never awaited"):
        decoding(pair)
        gc.collect()
    assert pair.decode.pool.num_free == POOL


@pytest.mark.parametrize("waits", [True, False])
async def test_a_cancel_needs_no_await(pair: Pair, waits: bool) -> None:
    with pair.prefill.pool.hold(2) as hold:
        sender = await pair.prefill.endpoint.prefill_session(pair.token, hold)
        receiver = await decoding(pair)
        await pair.settle()
        cancelled = receiver.cancel("a better offer")
        while sender.error is None:
            await pair.settle()
        if waits:
            await cancelled
        again = sender.cancel("as it says")
        await (again if waits else pair.settle())
        for session in (sender, receiver):
            with pytest.raises(TransferCancelled, match="a better offer"):
                await session.wait()


async def test_the_blocks_of_a_session_are_taken_once(pair: Pair) -> None:
    with pair.prefill.pool.hold(2) as hold:
        async with pair.prefill.endpoint.prefill_session(pair.token, hold) as sender:
            receiver = await decoding(pair)
            with pytest.raises(BlockStateError, match=r"t: its blocks are offered; take\(\) them"):
                receiver.take()
            await transfer(pair, sender)
    with receiver.take(), pytest.raises(BlockStateError, match="t: its blocks were taken before"):
        receiver.take()
    await receiver.cancel("late")
    assert receiver.error is None
