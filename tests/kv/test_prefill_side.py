from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import (
    BlockStateError,
    InvalidArgument,
    LayoutMismatch,
    OutOfBounds,
    PeerLost,
    ProtocolError,
    TicketExpired,
    TicketInvalid,
    TransferCancelled,
    TransferRefused,
)
from kvxfer.kv.connection import Connection, grant_ranges
from kvxfer.kv.messages import Cancel, encode
from kvxfer.kv.plan import plan_transfer
from kvxfer.kv.session_state import PrefillState
from kvxfer.ticket import Ticket, verify_ticket
from verify.polling import PATIENCE, eventually

from .workers import (
    KEY,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    Worker,
    accepted,
    dial_each_other,
    early_offers,
    make_ticket,
    receive,
    send,
    worker,
)

pytestmark = pytest.mark.native


async def test_an_offer_that_comes_early_waits_for_its_request(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiving = asyncio.create_task(receive(prefill, decode, ticket, 4))
    await eventually(lambda: early_offers(prefill) == 1)
    sent = await send(prefill, ticket, 4, rng)
    assert await receiving == sent
    assert early_offers(prefill) == 0


async def test_a_decode_that_comes_after_prefill_has_given_up_fails_at_once(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(1) as hold:
        session = await prefill.endpoint.prefill_session(ticket, hold)
        await session.cancel("changed my mind")
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    with pytest.raises(TransferCancelled, match=r"refused by prefill worker 'p'.*changed my mind"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_a_prefill_whose_offer_is_refused_fails_at_once(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(1) as hold:
        session = await prefill.endpoint.prefill_session(ticket, hold)

        def an_hour_later(token: str) -> Ticket:
            return verify_ticket(token, KEY, now=SYSTEM_CLOCK.unix() + 3600)

        monkeypatch.setattr(prefill.endpoint._identity, "verify", an_hour_later)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
        with pytest.raises(TicketExpired):
            await asyncio.wait_for(session.wait(), PATIENCE)
        with pytest.raises(TicketExpired, match="refused by prefill worker 'p'"):
            await asyncio.wait_for(receiver.wait(), PATIENCE)
    assert prefill.pool.num_free == NUM_BLOCKS


async def test_a_prefill_that_comes_after_decode_has_given_up_fails_at_once(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    await eventually(lambda: early_offers(prefill) == 1)
    await receiver.cancel("changed my mind")
    await eventually(lambda: early_offers(prefill) == 0)
    with (
        prefill.pool.hold(1) as hold,
        pytest.raises(TransferCancelled, match="cancelled by decode worker 'd': changed my mind"),
    ):
        await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_peer_cannot_cancel_the_offer_of_another(
    pair: tuple[Worker, Worker], rng: random.Random, fabric: str
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode, transfer_id="known")
    receiving = asyncio.create_task(receive(prefill, decode, ticket, 4))
    await eventually(lambda: early_offers(prefill) == 1)
    async with worker("e", fabric) as other:
        peer = await other.engine.connect(prefill.engine.address)
        peer.send(encode(Cancel("known", "it is not mine")))
        # Prefill takes this offer after the CANCEL.
        later = await other.endpoint.decode_session(
            make_ticket(prefill, other), prefill.engine.address, 1
        )
        await eventually(lambda: early_offers(prefill) == 2)
        await later.cancel("it has shown what it had to")
        assert await send(prefill, ticket, 4, rng) == await receiving


async def test_a_prefill_that_comes_after_decode_has_died_fails_at_once(fabric: str) -> None:
    async with worker("p", fabric) as prefill:
        async with worker("d", fabric) as decode:
            ticket = make_ticket(prefill, decode)
            await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
            await eventually(lambda: early_offers(prefill) == 1)
            await decode.engine.close()
        await eventually(lambda: early_offers(prefill) == 0)
        with prefill.pool.hold(1) as hold, pytest.raises(PeerLost):
            await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_prefill_that_waits_for_a_decode_that_dies_fails_at_once(fabric: str) -> None:
    async with worker("p", fabric) as prefill:
        async with worker("d", fabric) as decode:
            await decode.engine.connect(prefill.engine.address)
            await eventually(
                lambda: [pair.named for pair in prefill.endpoint._connections] == [("d", 1)]
            )
            ours, other = make_ticket(prefill, decode), make_ticket(prefill, decode, decode_id="e")
            with prefill.pool.hold(1) as hold:
                waiting = await prefill.endpoint.prefill_session(ours, hold)
                of_another = await prefill.endpoint.prefill_session(other, hold)
            await decode.engine.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(waiting.wait(), PATIENCE)
        assert of_another.state is PrefillState.WAITING
        await of_another.cancel("the test is over")


async def test_a_prefill_that_comes_after_its_decode_was_lost_fails_at_once(fabric: str) -> None:
    """The decode worker's OFFER has never arrived."""
    async with worker("p", fabric) as prefill:
        async with worker("d", fabric) as decode:
            await decode.engine.connect(prefill.engine.address)
            await eventually(
                lambda: [pair.named for pair in prefill.endpoint._connections] == [("d", 1)]
            )
            ticket = make_ticket(prefill, decode)
            await decode.engine.close()
            await eventually(lambda: not list(prefill.endpoint._connections))
        with (
            prefill.pool.hold(1) as hold,
            pytest.raises(PeerLost, match="decode worker 'd' was lost before the prefill request"),
        ):
            await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_connection_that_was_lost_is_not_held_against_later_tickets(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    before, reconnected = make_ticket(prefill, decode), make_ticket(prefill, decode)
    peer = await decode.engine.connect(prefill.engine.address)
    await eventually(lambda: [pair.named for pair in prefill.endpoint._connections] == [("d", 1)])
    peer.close()
    await eventually(lambda: not list(prefill.endpoint._connections))
    unknown, later = make_ticket(prefill, decode, issued_at=0.0), make_ticket(prefill, decode)
    with prefill.pool.hold(1) as hold:
        for ticket in (unknown, later):
            async with prefill.endpoint.prefill_session(ticket, hold) as session:
                assert session.state is PrefillState.WAITING
        with pytest.raises(PeerLost):
            await prefill.endpoint.prefill_session(before, hold)
    await decode.engine.connect(prefill.engine.address)
    await eventually(lambda: [pair.named for pair in prefill.endpoint._connections] == [("d", 1)])
    sent, received = await asyncio.gather(
        send(prefill, reconnected, 2, rng), receive(prefill, decode, reconnected, 2)
    )
    assert sent == received


async def test_the_loss_of_an_old_connection_leaves_transfers_over_a_newer_one(
    fabric: str, rng: random.Random
) -> None:
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        await dial_each_other(prefill, decode)
        await eventually(
            lambda: [pair.named for pair in prefill.endpoint._connections] == [("d", 1), ("d", 1)]
        )
        ticket = make_ticket(prefill, decode)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
        with prefill.pool.hold(2) as hold:
            prefill.fill(hold.ids.tolist(), rng)
            async with prefill.endpoint.prefill_session(ticket, hold) as sender:
                await accepted(receiver)
                [used] = sender._met
                [old] = [pair for pair in prefill.endpoint._connections if pair is not used]
                prefill.endpoint._handler.drop(old, PeerLost("the test says so"))
                for layer in range(LAYERS):
                    sender.write_layer(layer)
                await sender.finish()
        await asyncio.wait_for(receiver.wait(), PATIENCE)
        receiver.take().release()


async def test_an_offer_that_is_replayed_changes_nothing(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    with prefill.pool.hold(2) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        async with prefill.endpoint.prefill_session(ticket, hold) as sender:
            await accepted(receiver)
            receiver._offer()
            for layer in range(LAYERS):
                sender.write_layer(layer)
            await sender.finish()
        await receiver.wait()
        with receiver.take() as taken:
            assert decode.contents(taken.ids.tolist()) == prefill.contents(hold.ids.tolist())


async def test_prefill_refuses_an_offer_of_another_layout_itself(
    fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(LAYOUT, head_size=64)
    async with worker("p", fabric) as prefill, worker("d", fabric, layout=other) as decode:
        monkeypatch.setattr(Connection, "inbound_plan", plan_transfer(other, other))
        monkeypatch.setattr("kvxfer.kv.connections.sources", lambda prefill, decode: (0,))
        ticket = make_ticket(prefill, decode)
        with prefill.pool.hold(1) as hold:
            session = await prefill.endpoint.prefill_session(ticket, hold)
            receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
            with pytest.raises(TransferRefused, match=r"head_size is 32 .* 64 .*layout-mismatch"):
                await asyncio.wait_for(receiver.wait(), PATIENCE)
            with pytest.raises(LayoutMismatch):
                await asyncio.wait_for(session.wait(), PATIENCE)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_block_tables_of_unequal_length_fail_both_sides(
    pair: tuple[Worker, Worker], first: str
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    text = "offers 3 blocks for the 2 blocks of prefill"
    with prefill.pool.hold(2) as hold:
        if first == "prefill":
            session = await prefill.endpoint.prefill_session(ticket, hold)
            receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
            with pytest.raises(InvalidArgument, match=text):
                await asyncio.wait_for(session.wait(), PATIENCE)
        else:
            receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
            await eventually(lambda: early_offers(prefill) == 1)
            with pytest.raises(InvalidArgument, match=text):
                await prefill.endpoint.prefill_session(ticket, hold)
        with pytest.raises(TransferRefused, match=text):
            await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_a_block_outside_the_pool_is_refused(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    monkeypatch.setattr(
        "kvxfer.kv.decode_session.pack_block_table",
        lambda ids: NUM_BLOCKS.to_bytes(4, "little") * len(ids),
    )
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    text = f"block {NUM_BLOCKS} of the block table is outside the pool"
    with pytest.raises(TransferRefused, match=text):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    with prefill.pool.hold(1) as hold, pytest.raises(InvalidArgument, match=text):
        await prefill.endpoint.prefill_session(ticket, hold)


async def test_grants_that_do_not_fit_the_planes_are_refused(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    planes = LAYERS * len(LAYOUT.parts)
    monkeypatch.setattr(
        "kvxfer.kv.endpoint.grant_ranges", lambda *granted: grant_ranges(*granted)[1:]
    )
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    with pytest.raises(TransferRefused, match=f"{planes - 1} grants for the {planes} planes"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_blocks_beyond_the_grants_fail_both_sides(
    pair: tuple[Worker, Worker], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    monkeypatch.setattr(
        "kvxfer.kv.endpoint.grant_ranges",
        lambda cache, plan, blocks: grant_ranges(cache, plan, blocks[:1]),
    )
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
    with pytest.raises(OutOfBounds):
        await asyncio.wait_for(send(prefill, ticket, 3, rng), PATIENCE)
    with pytest.raises(TransferCancelled):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    await eventually(lambda: decode.pool.num_free == NUM_BLOCKS)
    assert prefill.pool.num_free == NUM_BLOCKS


async def test_grants_that_are_not_descriptors_fail_both_sides(
    pair: tuple[Worker, Worker], rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    planes = LAYERS * len(LAYOUT.parts)
    monkeypatch.setattr("kvxfer.kv.prefill_session._CAUSE_SECONDS", 0)  # it is a cause itself
    monkeypatch.setattr("kvxfer.engine.Counter.grant", lambda counter, ranges: [b"x"] * planes)
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    with pytest.raises(ProtocolError, match="descriptor"):
        await asyncio.wait_for(send(prefill, ticket, 2, rng), PATIENCE)
    with pytest.raises(TransferCancelled, match="descriptor"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    await eventually(lambda: decode.pool.num_free == prefill.pool.num_free == NUM_BLOCKS)


async def test_early_offers_are_bounded_per_peer(fabric: str) -> None:
    async with (
        worker("p", fabric, max_early_offers_per_peer=2) as prefill,
        worker("d", fabric) as decode,
    ):
        receivers = [
            await decode.endpoint.decode_session(
                make_ticket(prefill, decode), prefill.engine.address, 1
            )
            for _ in range(3)
        ]
        with pytest.raises(TransferRefused, match=r"2 offers .* backpressure|\(backpressure\)"):
            await asyncio.wait_for(receivers[2].wait(), PATIENCE)
        assert early_offers(prefill) == 2
        for receiver in receivers:
            await receiver.cancel("enough")


async def test_released_blocks_cannot_be_sent_and_decode_fails_too(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    hold = prefill.pool.hold(1)
    hold.release()
    with pytest.raises(BlockStateError, match="no longer owned here"):
        await prefill.endpoint.prefill_session(ticket, hold)
    with pytest.raises(BlockStateError, match="refused by prefill worker 'p'"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)


@pytest.mark.parametrize("offer_first", [True, False])
async def test_a_declined_transfer_is_refused_now_or_when_its_offer_comes(
    pair: tuple[Worker, Worker], offer_first: bool
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    if not offer_first:
        prefill.endpoint.decline(ticket, "aborted")
    session = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    if offer_first:
        await eventually(lambda: early_offers(prefill) == 1)
        prefill.endpoint.decline(ticket, "aborted")
    with pytest.raises(TransferCancelled, match=r"refused by prefill .* aborted"):
        await session.wait()
    with pytest.raises(TicketInvalid, match="already used"):
        prefill.endpoint.decline(ticket, "aborted")
