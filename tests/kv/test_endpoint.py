from __future__ import annotations

import asyncio
import dataclasses
import random
import uuid
from typing import Any

import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import (
    ConnectFailed,
    EngineClosed,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    PeerError,
    TicketExpired,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import PATIENCE, eventually

from .workers import (
    KEY,
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


async def test_an_endpoint_that_closes_cancels_its_transfers_with_that_reason(fabric: str) -> None:
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        ticket = make_ticket(prefill, decode)
        waiting = make_ticket(prefill, decode)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
        await decode.endpoint.decode_session(waiting, prefill.engine.address, 3)
        hold = prefill.pool.hold(3)
        sender = await prefill.endpoint.prefill_session(ticket, hold)
        hold.release()
        await accepted(receiver)
        await decode.endpoint.close()
        assert decode.pool.num_free == NUM_BLOCKS
        with pytest.raises(TransferCancelled, match="instance 'd' closes"):
            await receiver.wait()
        with pytest.raises(TransferCancelled, match="instance 'd' closes"):
            await asyncio.wait_for(sender.wait(), PATIENCE)
        with pytest.raises(EngineClosed, match="KV endpoint of instance 'd' is closed"):
            await decode.endpoint.decode_session(waiting, prefill.engine.address, 3)
        await eventually(lambda: early_offers(prefill) == 0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"expires_at": SYSTEM_CLOCK.unix() - 60}, TicketExpired, "expired"),
        ({"prefill_id": "other"}, TicketInvalid, "names prefill worker 'other' of epoch 1"),
        ({"prefill_epoch": 2}, TicketInvalid, "names prefill worker 'p' of epoch 2"),
        ({"decode_id": "other"}, TicketInvalid, "names decode worker 'other' of epoch 1"),
        ({"decode_epoch": 0}, TicketInvalid, "names decode worker 'd' of epoch 0"),
    ],
    ids=["expired", "prefill id", "prefill epoch", "decode id", "decode epoch"],
)
async def test_a_ticket_of_another_pair_epoch_or_time_is_refused_on_both_sides(
    pair: tuple[Worker, Worker],
    change: dict[str, Any],
    error: type[KvxferError],
    text: str,
) -> None:
    prefill, decode = pair
    good = Ticket(uuid.uuid4().hex, "request", "p", 1, "d", 1, SYSTEM_CLOCK.unix() + 20 * PATIENCE)
    token = sign_ticket(dataclasses.replace(good, **change), KEY)
    with pytest.raises(error, match=text):
        await decode.endpoint.decode_session(token, prefill.engine.address, 1)
    assert decode.pool.num_free == NUM_BLOCKS
    if not text.startswith("names decode"):
        with prefill.pool.hold(1) as hold, pytest.raises(error, match=text):
            await prefill.endpoint.prefill_session(token, hold)


@pytest.mark.parametrize(
    ("change", "key", "error", "text"),
    [
        ({"expires_at": 1.0}, KEY, TicketExpired, "expired"),
        ({}, b"another cluster's key", TicketInvalid, "cannot be trusted"),
        ({"prefill_epoch": 0}, KEY, TicketInvalid, "names prefill worker 'p' of epoch 0"),
        (
            {"decode_epoch": 0},
            KEY,
            TicketInvalid,
            "names decode worker 'd' of epoch 0, the offer is from 'd' of epoch 1",
        ),
        ({"transfer_id": "t"}, KEY, TicketInvalid, "carries the ticket of transfer t"),
    ],
    ids=["expired", "forged", "prefill epoch", "decode epoch", "another transfer"],
)
async def test_prefill_refuses_an_offer_whose_ticket_is_not_for_it(
    pair: tuple[Worker, Worker],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    key: bytes,
    error: type[KvxferError],
    text: str,
) -> None:
    prefill, decode = pair
    good = Ticket(uuid.uuid4().hex, "request", "p", 1, "d", 1, SYSTEM_CLOCK.unix() + 20 * PATIENCE)
    offer = DecodeSession._offer

    def offer_with_a_bad_ticket(session: DecodeSession) -> None:
        token = sign_ticket(dataclasses.replace(good, **change), key)
        session.ticket = dataclasses.replace(session.ticket, token=token)
        offer(session)

    monkeypatch.setattr(DecodeSession, "_offer", offer_with_a_bad_ticket)
    receiver = await decode.endpoint.decode_session(
        sign_ticket(good, KEY), prefill.engine.address, 2
    )
    with pytest.raises(error, match=f"refused by prefill worker 'p': .*{text}"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    assert decode.pool.num_free == NUM_BLOCKS
    monkeypatch.undo()
    # A refused ticket does not use up the right one.
    with prefill.pool.hold(1) as hold:
        async with prefill.endpoint.prefill_session(sign_ticket(good, KEY), hold):
            pass


async def test_a_ticket_is_valid_for_one_transfer(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    received, sent = await asyncio.gather(
        receive(prefill, decode, ticket, 2), send(prefill, ticket, 2, rng)
    )
    assert received == sent
    with pytest.raises(TicketInvalid, match="already used for its decode session"):
        await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    with (
        prefill.pool.hold(2) as hold,
        pytest.raises(TicketInvalid, match="already used for its prefill session"),
    ):
        await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_ticket_that_was_used_takes_no_counter(
    fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releasing a counter would block the event loop if NICs place the bytes."""
    async with worker("p", fabric) as prefill, worker("d", fabric) as decode:
        ticket = make_ticket(prefill, decode)
        first = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
        monkeypatch.setattr(decode.engine, "counter", None)
        with pytest.raises(TicketInvalid):
            await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
        assert decode.pool.num_free == NUM_BLOCKS - 3
        await first.cancel("enough")


async def test_layouts_that_differ_are_refused_by_name_before_a_block_is_taken(
    fabric: str,
) -> None:
    other = dataclasses.replace(LAYOUT, dtype="bfloat16")
    async with worker("p", fabric) as prefill, worker("d", fabric, layout=other) as decode:
        with pytest.raises(LayoutMismatch) as caught:
            await decode.endpoint.decode_session(
                make_ticket(prefill, decode), prefill.engine.address, 1
            )
        assert caught.value.field == "dtype"
        assert (caught.value.prefill, caught.value.decode) == ("float32", "bfloat16")
        assert decode.pool.num_free == NUM_BLOCKS


async def test_a_new_epoch_is_sent_to_peers_and_old_tickets_are_refused(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    old = make_ticket(prefill, decode)
    first = make_ticket(prefill, decode)
    await asyncio.gather(receive(prefill, decode, first, 1), send(prefill, first, 1, rng))
    decode.endpoint.set_epoch(2)
    with pytest.raises(TicketInvalid, match="epoch 1, this is 'd' of epoch 2"):
        await decode.endpoint.decode_session(old, prefill.engine.address, 1)
    new = make_ticket(prefill, decode)
    received, sent = await asyncio.gather(
        receive(prefill, decode, new, 1), send(prefill, new, 1, rng)
    )
    assert received == sent


async def test_a_peer_that_sends_invalid_messages_is_disconnected(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    [peer] = decode.engine.peers
    peer.send(b"nonsense")
    with pytest.raises(PeerError):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    assert decode.pool.num_free == NUM_BLOCKS
    again = make_ticket(prefill, decode)
    fresh = await decode.endpoint.decode_session(again, prefill.engine.address, 1)
    await fresh.cancel("only looking")


async def test_an_address_without_an_engine_is_an_error_and_takes_no_block(
    pair: tuple[Worker, Worker], fabric: str
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    async with worker("gone", fabric) as gone:
        address = gone.engine.address
    with pytest.raises(ConnectFailed):
        await decode.endpoint.decode_session(ticket, address, 1)
    assert decode.pool.num_free == NUM_BLOCKS


async def test_pool_and_cache_have_to_be_of_one_size(pair: tuple[Worker, Worker]) -> None:
    prefill, _ = pair
    with pytest.raises(InvalidArgument, match=f"the pool has 3 blocks, the cache {NUM_BLOCKS}"):
        KvEndpoint(prefill.engine, prefill.cache, BlockPool(3), KvIdentity("p", KEY, 1))


async def test_a_session_of_an_engine_that_is_closed_says_so(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    await decode.engine.close()
    with pytest.raises(EngineClosed):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    assert decode.pool.num_free == NUM_BLOCKS
