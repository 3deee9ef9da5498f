from __future__ import annotations

import asyncio
import random

import pytest

from kvxfer.errors import (
    InvalidArgument,
    LeaseExpired,
    MessageTooLarge,
    TransferCancelled,
)
from kvxfer.kv.messages import MAX_TAIL_BYTES
from kvxfer.kv.session_state import PrefillState
from verify.polling import PATIENCE

from .workers import LAYERS, LAYOUT, NUM_BLOCKS, Worker, accepted, make_ticket, receive

pytestmark = pytest.mark.native


async def test_layers_that_are_written_before_the_offer_are_kept(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(3) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            for layer in range(LAYERS):
                session.write_layer(layer)
            finishing = asyncio.create_task(session.finish(b"tail"))
            await asyncio.sleep(0)
            states = [session.state]
            assert (session.nbytes, session.fabric) == (0, None)
            received = await receive(prefill, decode, ticket, 3)
            await finishing
            assert [*states, session.state] == [PrefillState.WAITING, PrefillState.DELIVERED]
            assert session.nbytes == 3 * LAYERS * LAYOUT.block_bytes
            assert session.writes >= 1
        assert received == prefill.contents(hold.ids.tolist())


async def test_layers_can_be_written_from_other_threads_while_the_offer_comes(
    pair: tuple[Worker, Worker], fabric: str, rng: random.Random
) -> None:
    prefill, decode = pair
    for _ in range(20):
        ticket = make_ticket(prefill, decode)
        with prefill.pool.hold(4) as hold:
            prefill.fill(hold.ids.tolist(), rng)
            async with prefill.endpoint.prefill_session(ticket, hold) as session:
                receiving = asyncio.create_task(receive(prefill, decode, ticket, 4))
                await asyncio.gather(
                    *(asyncio.to_thread(session.write_layer, layer) for layer in range(LAYERS))
                )
                await session.finish(b"tail")
                assert session.fabric == fabric
                assert session.nbytes == 4 * LAYERS * LAYOUT.block_bytes
            assert await receiving == prefill.contents(hold.ids.tolist())


async def test_the_largest_tail_arrives_and_a_larger_one_is_refused(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    tail = rng.randbytes(MAX_TAIL_BYTES)
    receiving = asyncio.create_task(receive(prefill, decode, ticket, 1, tail))
    with prefill.pool.hold(1) as hold:
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            for layer in range(LAYERS):
                session.write_layer(layer)
            with pytest.raises(MessageTooLarge, match=f"send at most {MAX_TAIL_BYTES}"):
                await session.finish(tail + b"x")
            await session.finish(tail)
    await receiving


async def test_prefill_cancels_at_any_layer(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    for _ in range(10):
        ticket = make_ticket(prefill, decode)
        layers = rng.randrange(LAYERS + 1)
        with prefill.pool.hold(5) as hold:
            receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 5)
            sender = await prefill.endpoint.prefill_session(ticket, hold)
            if rng.random() < 0.5:
                await accepted(receiver)
            for layer in range(layers):
                sender.write_layer(layer)
            await sender.cancel("out of patience")
            assert sender.state is PrefillState.CANCELLED
            with pytest.raises(TransferCancelled, match="cancelled here: out of patience"):
                await sender.finish(b"")
            with pytest.raises(TransferCancelled, match="out of patience"):
                sender.write_layer(LAYERS - 1)
            with pytest.raises(TransferCancelled, match="out of patience"):
                await asyncio.wait_for(receiver.wait(), PATIENCE)
            assert decode.pool.num_free == NUM_BLOCKS


async def test_a_lease_ends_the_wait_for_an_offer(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode, transfer_id="t-2")
    with prefill.pool.hold(2) as hold:
        session = await prefill.endpoint.prefill_session(ticket, hold, lease_seconds=0.1)
        for layer in range(LAYERS):
            session.write_layer(layer)
        with pytest.raises(
            LeaseExpired, match=r"transfer t-2: decode worker 'd' made no offer within 0.1 s"
        ):
            await session.finish()
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    with pytest.raises(LeaseExpired, match="refused by prefill worker 'p'"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_a_layer_is_written_once_and_has_to_exist(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    with prefill.pool.hold(1) as hold:
        async with prefill.endpoint.prefill_session(make_ticket(prefill, decode), hold) as session:
            session.write_layer(0)
            with pytest.raises(InvalidArgument, match="layer 0 was written before"):
                session.write_layer(0)
            for layer in (-1, LAYERS):
                with pytest.raises(InvalidArgument, match=f"layer {layer} does not exist"):
                    session.write_layer(layer)
            with pytest.raises(InvalidArgument, match=r"finish\(\) before layer 1, 2, 3, 4, 5"):
                await session.finish()
