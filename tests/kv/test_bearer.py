"""Bearer tickets, which let prefill keep blocks for any decode worker; and the release of blocks
that decode does not need."""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from typing import Any

import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import (
    PeerLost,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.instances import Role
from kvxfer.kv.session_state import PrefillState
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import PATIENCE, eventually

from .workers import (
    KEY,
    LAYERS,
    NUM_BLOCKS,
    Worker,
    early_offers,
    make_ticket,
    receive,
    send,
    worker,
)

pytestmark = pytest.mark.native


def bearer(prefill: Worker, **more: Any) -> str:
    said: dict[str, Any] = {
        "transfer_id": uuid.uuid4().hex,
        "request_id": "request",
        "prefill_id": prefill.endpoint.instance_id,
        "prefill_epoch": prefill.endpoint.epoch,
        "decode_id": "",
        "decode_epoch": 0,
        "expires_at": SYSTEM_CLOCK.unix() + 20 * PATIENCE,
    }
    return sign_ticket(Ticket(**said | more), KEY)


async def test_the_first_decode_worker_gets_the_blocks(fabric: str, rng: random.Random) -> None:
    async with (
        worker("p", fabric) as prefill,
        worker("d", fabric) as decode,
        worker("e", fabric) as late,
    ):
        ticket = bearer(prefill)
        sending = asyncio.create_task(send(prefill, ticket, 3, rng))
        received = await receive(prefill, decode, ticket, 3)
        assert received == await sending
        with pytest.raises(TicketInvalid, match=r"refused by .* used by decode worker 'd'"):
            await receive(prefill, late, ticket, 3)
        with pytest.raises(TicketInvalid, match="already used for its decode session"):
            await receive(prefill, decode, ticket, 3)


async def test_kept_blocks_outlive_a_registration_but_not_the_process(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket, foreign = bearer(prefill), bearer(prefill, prefill_epoch=5)
    prefill.endpoint.set_epoch(2)
    received, sent = await asyncio.gather(
        receive(prefill, decode, ticket, 2), send(prefill, ticket, 2, rng)
    )
    assert received == sent
    with pytest.raises(
        TicketInvalid, match=r"refused by .* 'p' of epoch 5, this is 'p' of epoch 2"
    ):
        await receive(prefill, decode, foreign, 2)


async def test_a_bearer_ticket_names_its_prefill_worker(pair: tuple[Worker, Worker]) -> None:
    prefill, decode = pair
    ticket, other = bearer(prefill), bearer(prefill, prefill_id="q")
    assert prefill.endpoint.side(ticket) is Role.PREFILL
    assert decode.endpoint.side(ticket) is Role.DECODE
    with pytest.raises(TicketInvalid, match="names prefill worker 'q'"):
        await decode.endpoint.decode_session(other, prefill.engine.address, 1)
    with pytest.raises(TicketInvalid, match="names decode worker ''"):
        await prefill.endpoint.decode_session(ticket, decode.engine.address, 1)
    with (
        decode.pool.hold(1) as hold,
        pytest.raises(TicketInvalid, match="names prefill worker 'p'"),
    ):
        await decode.endpoint.prefill_session(ticket, hold)


async def test_a_ticket_is_not_offered_for_another_prompt_and_stays_good(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = bearer(prefill, prompt_digest=b"ours")
    with pytest.raises(TicketInvalid, match="is for another prompt"):
        await decode.endpoint.decode_session(
            ticket, prefill.engine.address, 2, prompt_digest=b"theirs"
        )
    received, sent = await asyncio.gather(
        receive(prefill, decode, ticket, 2), send(prefill, ticket, 2, rng)
    )
    assert received == sent


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("bears", [True, False])
async def test_blocks_that_decode_releases_are_free_at_once(
    pair: tuple[Worker, Worker], first: str, bears: bool
) -> None:
    prefill, decode = pair
    ticket = bearer(prefill) if bears else make_ticket(prefill, decode)
    text = "released by decode worker 'd': it is cached"
    with prefill.pool.hold(2) as hold:
        if first == "prefill":
            session = await prefill.endpoint.prefill_session(ticket, hold)
            for layer in range(LAYERS):
                session.write_layer(layer)
            await decode.endpoint.release(ticket, prefill.engine.address, "it is cached")
            with pytest.raises(TransferCancelled, match=text):
                await asyncio.wait_for(session.finish(), PATIENCE)
        else:
            await decode.endpoint.release(ticket, prefill.engine.address, "it is cached")
            await eventually(lambda: len(prefill.endpoint._ledger) == 1)
            with pytest.raises(TransferCancelled, match=text):
                await prefill.endpoint.prefill_session(ticket, hold)
    assert prefill.pool.num_free == NUM_BLOCKS
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 2)
    with pytest.raises(TicketInvalid, match="already used"):
        await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_a_release_after_the_offer_changes_nothing(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = bearer(prefill)
    receiving = asyncio.create_task(receive(prefill, decode, ticket, 2))
    await eventually(lambda: early_offers(prefill) == 1)
    await decode.endpoint.release(ticket, prefill.engine.address, "by mistake")
    assert await send(prefill, ticket, 2, rng) == await receiving


@pytest.mark.parametrize("bears", [True, False])
async def test_blocks_that_decode_keeps_outlive_their_lease(
    pair: tuple[Worker, Worker], rng: random.Random, bears: bool
) -> None:
    prefill, decode = pair
    ticket = bearer(prefill) if bears else make_ticket(prefill, decode)
    with prefill.pool.hold(2) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        async with prefill.endpoint.prefill_session(ticket, hold, lease_seconds=60.0) as kept:
            for layer in range(LAYERS):
                kept.write_layer(layer)
            await decode.endpoint.keep(ticket, prefill.engine.address)
            await eventually(lambda: kept.lease_remaining > 60.0)
            assert kept.state is PrefillState.WAITING
            received = asyncio.create_task(receive(prefill, decode, ticket, 2))
            await kept.finish(b"tail")
            assert await received == prefill.contents(hold.ids.tolist())


async def test_blocks_kept_for_a_decode_worker_that_dies_are_free_at_once(fabric: str) -> None:
    async with worker("p", fabric) as prefill:
        ticket = bearer(prefill)
        with prefill.pool.hold(1) as hold:
            kept = await prefill.endpoint.prefill_session(ticket, hold)
        async with worker("d", fabric) as decode:
            await decode.endpoint.keep(ticket, prefill.engine.address)
            await eventually(lambda: kept._met)
            await decode.engine.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(kept.wait(), PATIENCE)
        assert prefill.pool.num_free == NUM_BLOCKS


async def test_blocks_kept_for_one_decode_worker_are_not_given_to_another(fabric: str) -> None:
    async with (
        worker("p", fabric) as prefill,
        worker("d", fabric) as decode,
        worker("e", fabric) as other,
    ):
        ticket = bearer(prefill)
        with prefill.pool.hold(1) as hold:
            kept = await prefill.endpoint.prefill_session(ticket, hold)
        await decode.endpoint.keep(ticket, prefill.engine.address)
        await eventually(lambda: kept._met)
        await other.endpoint.keep(ticket, prefill.engine.address)
        with pytest.raises(TicketInvalid, match="already used by decode worker 'd'"):
            await receive(prefill, other, ticket, 1)
        assert [pair.hello.instance_id for pair in kept._met] == ["d"]
        await kept.cancel("the test is over")


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
async def test_a_keep_without_a_time_changes_nothing(
    pair: tuple[Worker, Worker], seconds: float
) -> None:
    prefill, decode = pair
    ticket = bearer(prefill)
    with prefill.pool.hold(1) as hold:
        kept = await prefill.endpoint.prefill_session(ticket, hold)
    decode.endpoint._lease_seconds = seconds
    await decode.endpoint.keep(ticket, prefill.engine.address)
    await decode.endpoint.release(ticket, prefill.engine.address, "told after it")
    with pytest.raises(TransferCancelled, match="told after it"):
        await asyncio.wait_for(kept.wait(), PATIENCE)


async def test_a_keep_has_no_effect_before_there_is_a_session_or_after_an_offer(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    await decode.endpoint.keep(ticket, prefill.engine.address)
    receiving = asyncio.create_task(receive(prefill, decode, ticket, 2))
    await eventually(lambda: early_offers(prefill) == 1)
    await decode.endpoint.keep(ticket, prefill.engine.address)
    assert await send(prefill, ticket, 2, rng) == await receiving
