from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from kvxfer.errors import (
    BlockPoolExhausted,
    BlockStateError,
    KvxferError,
    LeaseExpired,
    PeerLost,
    TransferCancelled,
)
from kvxfer.kv.block_pool import BlockState
from kvxfer.kv.session_state import DecodeState
from verify.polling import PATIENCE, eventually

from .workers import (
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    Worker,
    accepted,
    early_offers,
    make_ticket,
    receive,
    send,
    worker,
)

pytestmark = pytest.mark.native


@pytest.mark.parametrize("kv", ["separate", "interleaved"])
async def test_every_byte_arrives_from_scattered_to_scattered_blocks(
    fabric: str, kv: Any, rng: random.Random
) -> None:
    layout = dataclasses.replace(LAYOUT, kv=kv)
    async with (
        worker("p", fabric, layout=layout) as prefill,
        worker("d", fabric, layout=layout) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        with prefill.scatter(rng, 9), decode.scatter(rng, 7):
            others = [b for b in range(NUM_BLOCKS) if decode.pool.state(b) is BlockState.HELD]
            decode.fill(others, rng)
            before = decode.contents(others)
            received, sent = await asyncio.gather(
                receive(prefill, decode, ticket, 7), send(prefill, ticket, 7, rng)
            )
            assert received == sent
            assert decode.contents(others) == before


async def test_the_states_of_the_blocks_follow_the_transfer(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    async with decode.endpoint.decode_session(ticket, prefill.engine.address, 2) as receiver:
        assert decode.pool.counts()[BlockState.OFFERED] == 2
        with pytest.raises(
            BlockStateError, match="its blocks are offered; take\\(\\) them after wait"
        ):
            receiver.take()
        with prefill.pool.hold(2) as hold:
            async with prefill.endpoint.prefill_session(ticket, hold) as sender:
                sender.write_layer(0)
                await accepted(receiver)
                assert decode.pool.counts()[BlockState.RECEIVING] == 2
                with pytest.raises(
                    BlockStateError, match="its blocks are receiving; take\\(\\) them after wait"
                ):
                    receiver.take()
                for layer in range(1, LAYERS):
                    sender.write_layer(layer)
                await sender.finish()
        assert await receiver.wait() == b""
        states = [receiver.state]
        assert decode.pool.counts()[BlockState.COMPLETE] == 2
        taken = receiver.take()
        assert [*states, receiver.state] == [DecodeState.COMPLETE, DecodeState.TAKEN]
        assert receiver.nbytes == 2 * LAYERS * LAYOUT.block_bytes
    assert decode.pool.counts()[BlockState.HELD] == 2
    taken.release()


async def test_many_transfers_at_once_do_not_mix(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    room = asyncio.Semaphore(NUM_BLOCKS // 4)

    async def one(seed: int) -> str:
        choices = random.Random(seed)
        blocks = choices.randint(1, 4)
        ticket = make_ticket(prefill, decode)
        fault = choices.random() < 0.4
        # If a side is cancelled before it sends anything, only the lease ends the other.
        lease = 1.0 if fault else None
        async with room:
            receiving = asyncio.create_task(
                receive(prefill, decode, ticket, blocks, lease_seconds=lease)
            )
            sending = asyncio.create_task(
                send(prefill, ticket, blocks, choices, lease_seconds=lease)
            )
            if fault:
                for _ in range(choices.randrange(20)):
                    await asyncio.sleep(0)
                choices.choice([receiving, sending]).cancel()
            received, sent = await asyncio.gather(receiving, sending, return_exceptions=True)
        if isinstance(received, list) and isinstance(sent, list):
            assert received == sent
            return "same"
        assert fault
        for outcome in (received, sent):
            assert isinstance(
                outcome, list | TransferCancelled | LeaseExpired | asyncio.CancelledError
            ), outcome
        return "cancelled"

    ends = await asyncio.gather(*(one(rng.getrandbits(32)) for _ in range(60)))
    assert ends.count("same") >= 15
    assert ends.count("cancelled") >= 1


async def test_decode_cancels_at_any_layer(pair: tuple[Worker, Worker], rng: random.Random) -> None:
    prefill, decode = pair
    for _ in range(10):
        ticket = make_ticket(prefill, decode)
        layers = rng.randrange(LAYERS)
        with prefill.pool.hold(5) as hold:
            async with (
                decode.endpoint.decode_session(ticket, prefill.engine.address, 5) as receiver,
                prefill.endpoint.prefill_session(ticket, hold) as sender,
            ):
                if rng.random() < 0.5:
                    await accepted(receiver)
                for layer in range(layers):
                    sender.write_layer(layer)
                await receiver.cancel("the user left")
                assert decode.pool.num_free == NUM_BLOCKS
                with pytest.raises(TransferCancelled, match="cancelled here: the user left"):
                    await receiver.wait()
                with pytest.raises(TransferCancelled):
                    receiver.take()
                with pytest.raises(
                    TransferCancelled, match="cancelled by decode worker 'd': the user left"
                ):
                    for layer in range(layers, LAYERS):
                        sender.write_layer(layer)
                        await asyncio.sleep(0)
                    await sender.finish(b"")
                await eventually(lambda: receiver.state is DecodeState.CANCELLED)


async def test_a_lease_ends_the_wait_for_a_prefill_request(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode, transfer_id="t-1")
    receiver = await decode.endpoint.decode_session(
        ticket, prefill.engine.address, 2, lease_seconds=0.1
    )
    with pytest.raises(LeaseExpired, match=r"transfer t-1: .* worker 'p' .* within 0.1 s"):
        await receiver.wait()
    assert decode.pool.num_free == NUM_BLOCKS
    await eventually(lambda: prefill.endpoint._ledger.failure("t-1"))
    assert early_offers(prefill) == 0
    with prefill.pool.hold(2) as hold, pytest.raises((LeaseExpired, TransferCancelled)):
        await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_lease_ends_the_wait_for_layers(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(2) as hold:
        session = await prefill.endpoint.prefill_session(ticket, hold)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
        session.write_layer(0)
        await accepted(receiver)
        receiver._lease.renew(0.01)
        with pytest.raises(LeaseExpired, match=r"did not send every layer within 0.01 s"):
            await receiver.wait()
        with pytest.raises((TransferCancelled, LeaseExpired), match="every layer"):
            await asyncio.wait_for(session.wait(), PATIENCE)


async def test_complete_blocks_that_are_not_taken_come_back_when_the_lease_ends(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    await send(prefill, ticket, 2, rng)
    await receiver.wait()
    receiver._lease.renew(0.01)
    assert decode.pool.num_free == NUM_BLOCKS - 2
    await eventually(lambda: decode.pool.num_free == NUM_BLOCKS)
    with pytest.raises(LeaseExpired, match=r"prefill did not take the blocks within 0.01 s"):
        receiver.take()


async def test_a_cancelled_task_leaves_no_block_behind(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    for side in ("prefill", "decode"):
        ticket = make_ticket(prefill, decode)
        receiving = asyncio.create_task(receive(prefill, decode, ticket, 3))

        async def half_a_prefill(ticket: str = ticket) -> None:
            with prefill.pool.hold(3) as hold:
                async with prefill.endpoint.prefill_session(ticket, hold) as session:
                    session.write_layer(0)
                    await asyncio.Event().wait()

        sending = asyncio.create_task(half_a_prefill())
        await eventually(lambda: decode.pool.counts()[BlockState.RECEIVING] == 3)
        (sending if side == "prefill" else receiving).cancel()
        if side == "decode":
            await eventually(lambda: decode.pool.num_free == NUM_BLOCKS)
            sending.cancel()
        ends = await asyncio.gather(sending, receiving, return_exceptions=True)
        assert isinstance(ends[0], asyncio.CancelledError)
        if side == "prefill":
            assert isinstance(ends[1], TransferCancelled)


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_a_peer_that_closes_in_mid_transfer_fails_the_other_side(
    fabric: str, lost: str
) -> None:
    async with AsyncExitStack() as stack:
        workers = {
            name: await stack.enter_async_context(worker(name, fabric))
            for name in ("prefill", "decode")
        }
        prefill, decode = workers["prefill"], workers["decode"]
        ticket = make_ticket(prefill, decode)
        with prefill.pool.hold(3) as hold:
            receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
            sender = await prefill.endpoint.prefill_session(ticket, hold)
            sender.write_layer(0)
            await accepted(receiver)
            await workers[lost].engine.close()
            # The connection's end is the cause, not the heartbeats that are missed later.
            if lost == "prefill":
                with pytest.raises(PeerLost) as caught:
                    await receiver.wait()
                with pytest.raises(KvxferError):
                    await sender.finish()
            else:
                for layer in range(1, LAYERS):
                    try:
                        sender.write_layer(layer)
                    except KvxferError:
                        break
                with pytest.raises(PeerLost) as caught:
                    await sender.finish()
            assert caught.type is PeerLost


async def test_an_exhausted_pool_refuses_and_the_ticket_stays_good(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with decode.pool.hold(NUM_BLOCKS - 1):
        with pytest.raises(BlockPoolExhausted, match=f"2 blocks asked for, 1 of {NUM_BLOCKS}"):
            await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
        assert decode.pool.num_free == 1
    received, sent = await asyncio.gather(
        receive(prefill, decode, ticket, 2), send(prefill, ticket, 2, rng)
    )
    assert received == sent
