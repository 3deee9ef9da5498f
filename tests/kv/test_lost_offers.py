from __future__ import annotations

import asyncio

import pytest

from kvxfer.clock import CLOCK_LEEWAY, SYSTEM_CLOCK
from kvxfer.errors import PeerLost, TransferCancelled
from kvxfer.kv.connection import Connection
from kvxfer.kv.messages import Release
from kvxfer.kv.waiting import LostOffers
from kvxfer.ticket import Ticket, verify_ticket
from tests.virtual_time import VirtualClock
from verify.polling import PATIENCE, eventually

from .workers import KEY, Worker, dial_each_other, make_ticket

pytestmark = pytest.mark.native


def test_a_lost_offer_is_known_by_its_engine_until_its_ticket_expires() -> None:
    clock = VirtualClock()
    lost = LostOffers(clock)
    for name, seconds in (("expired", -CLOCK_LEEWAY), ("good", 60)):
        expires, token = clock.unix() + seconds, f"token of {name}"
        lost.add("engine", Ticket(name, "r", "p", 1, "d", 1, expires, token=token), "why")
    assert lost.of("engine") == [Release("good", "token of good", "why")]
    assert lost.of("another") == []
    assert len(lost._releases) == 1


async def offer_that_is_lost(
    prefill: Worker, decode: Worker, ticket: str, monkeypatch: pytest.MonkeyPatch
) -> Connection:
    """Loses decode's connection with its OFFER, and returns it. Prefill may not know of the loss
    yet."""
    monkeypatch.setattr(prefill.endpoint._prefill_side, "offer", lambda *_: None)
    receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
    [inbound] = receiver._inbounds
    decode.endpoint._handler.drop(inbound.connection, PeerLost("the test says so"))
    with pytest.raises(PeerLost):
        await asyncio.wait_for(receiver.wait(), PATIENCE)
    return inbound.connection


async def test_a_lost_offer_is_reported_over_the_next_connection(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    lost = await offer_that_is_lost(prefill, decode, ticket, monkeypatch)
    lost.peer.close()
    await eventually(lambda: not list(prefill.endpoint._connections))
    await decode.engine.connect(prefill.engine.address)
    transfer_id = verify_ticket(ticket, KEY, now=SYSTEM_CLOCK.unix()).transfer_id
    await eventually(lambda: prefill.endpoint._ledger.failure(transfer_id) is not None)
    with (
        prefill.pool.hold(1) as hold,
        pytest.raises(TransferCancelled, match="its OFFER was lost: the test says so"),
    ):
        await prefill.endpoint.prefill_session(ticket, hold)


async def test_a_lost_offer_is_reported_once_over_another_connection(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    await dial_each_other(prefill, decode)
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(1) as hold:
        sender = await prefill.endpoint.prefill_session(ticket, hold)
        await offer_that_is_lost(prefill, decode, ticket, monkeypatch)
        with pytest.raises(TransferCancelled, match="its OFFER was lost: the test says so"):
            await asyncio.wait_for(sender.wait(), PATIENCE)
    [other] = decode.endpoint._connections
    decode.endpoint._handler._tell_of_lost_offers(other)
    after = make_ticket(prefill, decode)
    other.send(
        Release(
            verify_ticket(after, KEY, now=SYSTEM_CLOCK.unix()).transfer_id,
            after,
            "to come after the other",
        )
    )
    await eventually(lambda: len(prefill.endpoint._ledger) == 2)
    assert "release" not in prefill.endpoint.refusals()
