from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.errors import KvxferError, PeerLost, PeerTimeout
from kvxfer.kv import connection as outbox
from kvxfer.kv.connection import Outbox
from kvxfer.kv.session_state import PrefillState
from tests.virtual_time import loop_clock, passes
from verify.polling import eventually

from .pair import POOL, Pair
from .steered import Engine, Network

SOON = outbox.PATIENCE_SECONDS + 0.1


class Heard:
    """A stand-in for an endpoint, which collects messages."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def peer_up(self, peer: Any) -> None:
        pass

    def peer_lost(self, peer: Any, error: KvxferError) -> None:
        pass

    def message(self, peer: Any, data: bytes) -> None:
        self.messages.append(data)


def engines() -> tuple[Network, Engine, Engine]:
    one, other = Engine("one"), Engine("other")
    one.handler, other.handler = Heard(), Heard()
    network = Network(one, other)
    network.join()
    return network, one, other


def unheard(error: KvxferError) -> None:
    raise AssertionError(error)


async def test_messages_keep_their_order_where_there_is_no_room() -> None:
    network, one, other = engines()
    network.max_messages = 1
    said: Any = one.peer
    box = Outbox(said, unheard, loop_clock())
    sent = [bytes([number]) for number in range(5)]
    for message in sent[:4]:
        box.send(message)
    assert list(network.messages["other"]) == sent[:1]
    while len(other.handler.messages) < 4:
        for step in network.steps():
            step()
        await passes(0.001)
    for step in network.steps():
        step()
    box.send(sent[4])
    for step in network.steps():
        step()
    assert other.handler.messages == sent


async def test_a_message_without_room_in_time_ends_the_connection() -> None:
    network, one, _ = engines()
    network.max_messages = 0
    errors: list[KvxferError] = []
    said: Any = one.peer
    box = Outbox(said, errors.append, loop_clock())
    box.send(b"first")
    box.send(b"second")
    await passes(outbox.PATIENCE_SECONDS)
    assert not errors
    await passes(2 * outbox.RETRY_SECONDS)
    [error] = errors
    assert isinstance(error, PeerTimeout)
    assert "peer other took no message for 1 s" in str(error)
    network.max_messages = 9
    box.send(b"third")
    assert list(network.messages["other"]) == [b"third"]


async def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    network, one, _ = engines()
    network.max_messages = 0
    errors: list[KvxferError] = []
    said: Any = one.peer
    box = Outbox(said, errors.append, loop_clock())
    box.send(b"first")
    await passes(2 * outbox.RETRY_SECONDS)
    loop_clock().sleep(1.5 * outbox.PATIENCE_SECONDS)
    await passes(2 * outbox.RETRY_SECONDS)
    assert not errors
    network.max_messages = 9
    await eventually(lambda: list(network.messages["other"]) == [b"first"])


async def test_messages_kept_for_a_lost_peer_are_dropped() -> None:
    network, one, _ = engines()
    network.max_messages = 0
    said: Any = one.peer
    box = Outbox(said, unheard, loop_clock())
    box.send(b"kept")
    network.lose(PeerLost("the cable was pulled"))
    await eventually(lambda: not box._waiting)
    with pytest.raises(PeerLost):
        box.send(b"late")


async def test_an_offer_that_cannot_be_sent_ends_both_sides_before_their_leases() -> None:
    pair = Pair()
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        pair.network.max_messages = 0
        with pair.prefill.pool.hold(1) as hold:
            sender = await pair.prefill.endpoint.prefill_session(pair.token, hold)
        receiver = await pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 1)
        with pytest.raises(PeerTimeout, match="took no message"):
            await asyncio.wait_for(receiver.wait(), SOON)
        with pytest.raises(PeerLost):
            await asyncio.wait_for(sender.wait(), SOON)
        assert pair.prefill.pool.num_free == pair.decode.pool.num_free == POOL


async def test_a_cancel_that_finds_no_room_is_sent_later() -> None:
    pair = Pair()
    async with pair.prefill.endpoint, pair.decode.endpoint:
        pair.meet()
        with pair.prefill.pool.hold(1) as hold:
            sender = await pair.prefill.endpoint.prefill_session(pair.token, hold)
        receiver = await pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 1)
        pair.deliver()
        assert sender.state is PrefillState.SENDING
        pair.network.max_messages = 0
        await receiver.cancel("enough")
        assert not pair.network.messages["prefill"]
        pair.network.max_messages = 1
        await eventually(lambda: bool(pair.network.messages["prefill"]))
        pair.deliver()
        with pytest.raises(KvxferError, match="enough"):
            await asyncio.wait_for(sender.wait(), SOON)
        pair.network.max_messages = 100


async def test_an_endpoint_that_closes_with_unsent_messages_ends_the_connection() -> None:
    pair = Pair()
    async with pair.prefill.endpoint:
        async with pair.decode.endpoint:
            pair.meet()
            with pair.prefill.pool.hold(1) as hold:
                sender = await pair.prefill.endpoint.prefill_session(pair.token, hold)
            await pair.decode.endpoint.decode_session(pair.token, "kvx://prefill", 1)
            pair.deliver()
            assert sender.state is PrefillState.SENDING
            pair.network.max_messages = 0
        with pytest.raises(PeerLost):
            await asyncio.wait_for(sender.wait(), SOON)
