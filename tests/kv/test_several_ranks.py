"""Instances of several ranks, each rank with a separate engine and endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import random

import numpy as np
import pytest

from kvxfer.engine import Peer
from kvxfer.errors import (
    InvalidArgument,
    LeaseExpired,
    PeerError,
    TransferCancelled,
)
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.session_state import DecodeState, PrefillState
from kvxfer.layout import KvLayout
from verify.polling import PATIENCE, eventually

from .ranks import LAYOUT, MLA, TOKENS, fleet, part_of, sized
from .workers import NUM_BLOCKS, early_offers, heads_by_token

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (sized(LAYOUT, 2, 1), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 1, 1), sized(LAYOUT, 2, 1)),
        (sized(LAYOUT, 1, 2), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 1, 1), sized(LAYOUT, 1, 2)),
        (sized(LAYOUT, 2, 1), sized(LAYOUT, 1, 2)),
        (sized(LAYOUT, 2, 2), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 4, 1), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 2, 1), sized(LAYOUT, 4, 1)),
        (sized(LAYOUT, 2, 1, order="HND"), sized(LAYOUT, 1, 1, block_size=6, kv="interleaved")),
        (sized(LAYOUT, 1, 2, block_size=6), sized(LAYOUT, 2, 1, order="HND")),
        (sized(MLA, 3, 1), sized(MLA, 1, 1)),
        (sized(MLA, 1, 1), sized(MLA, 2, 1)),
        # more replicas than layers: one rank has nothing to send, but takes part
        (sized(MLA, 3, 1, num_layers=2), sized(MLA, 1, 1, num_layers=2)),
    ],
    ids=lambda layout: f"{'mla-' * layout.mla}tp{layout.tp_size}pp{layout.pp_size}-{layout.order}",
)
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checked"])
async def test_every_rank_gets_its_part(
    fabric: str, rng: random.Random, prefill: KvLayout, decode: KvLayout, checksums: bool
) -> None:
    shape = (prefill.num_layers, 1 if prefill.mla else 2, TOKENS, prefill.num_kv_heads)
    nbytes = int(np.prod(shape)) * prefill.vector_bytes
    cache = np.frombuffer(rng.randbytes(nbytes), np.uint8).reshape(*shape, prefill.vector_bytes)
    async with (
        fleet(fabric, prefill, decode, checksums=checksums) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ranks.fill(cache)
        ticket = ranks.ticket()
        first = rng.choice(["prefill", "decode"])
        receivers = await ranks.offers(ticket) if first == "decode" else []
        senders = await ranks.requests(ticket, stack)
        receivers = receivers or await ranks.offers(ticket)

        async def send(rank: int, session: PrefillSession) -> None:
            for layer in range(prefill.layers_per_rank):
                await asyncio.to_thread(session.write_layer, layer)
            await session.finish(b"tail" if rank == 0 else b"")

        tails = await asyncio.gather(
            *(receiver.wait() for receiver in receivers),
            *(send(rank, session) for rank, session in enumerate(senders)),
        )
        # The first rank has the tail; a stage that rank 0 does not write to gets none.
        assert set(tails[: len(receivers)]) <= {b"tail", b""}
        assert tails[0] == b"tail"
        for rank, receiver in zip(ranks.decode, receivers, strict=True):
            layout = rank.cache.layout
            assert receiver.nbytes == len(receiver._table) // 4 * layout.block_bytes * (
                layout.layers_per_rank
            )
            with receiver.take() as hold:
                found = heads_by_token(rank.cache, hold.ids.tolist())[:, :, :TOKENS]
            np.testing.assert_array_equal(found, part_of(cache, layout))
        assert {session.state for session in senders} == {PrefillState.DELIVERED}


@pytest.mark.parametrize("end", ["cancels", "closes", "dies"])
async def test_when_one_prefill_rank_fails_so_do_decode_and_the_other_rank(
    fabric: str, end: str
) -> None:
    async with (
        fleet(fabric, sized(LAYOUT, 2, 1), LAYOUT) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ticket = ranks.ticket()
        senders = await ranks.requests(ticket, stack)
        [receiver] = await ranks.offers(ticket)
        await eventually(lambda: receiver.state is DecodeState.RECEIVING)
        senders[0].write_layer(0)
        if end == "cancels":
            await senders[1].cancel("out of memory")
        elif end == "closes":
            await ranks.prefill[1].endpoint.close()
        else:
            await ranks.prefill[1].engine.close()
        with pytest.raises((TransferCancelled, PeerError)) as caught:
            await asyncio.wait_for(receiver.wait(), PATIENCE)
        if end == "cancels":
            assert "cancelled by rank 1 of prefill worker 'p'" in str(caught.value)
            assert "out of memory" in str(caught.value)
        with pytest.raises(TransferCancelled, match="cancelled by decode worker 'd'"):
            await asyncio.wait_for(senders[0].wait(), PATIENCE)
        assert ranks.decode[0].pool.num_free == NUM_BLOCKS
        await eventually(lambda: receiver.state in (DecodeState.CANCELLED, DecodeState.FAILED))


@pytest.mark.parametrize("end", ["cancels", "closes", "dies"])
async def test_when_one_decode_rank_fails_so_do_prefill_and_the_other_rank(
    fabric: str, end: str
) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ticket = ranks.ticket()
        [sender] = await ranks.requests(ticket, stack)
        receivers = await ranks.offers(ticket)
        await eventually(lambda: receivers[0].state is DecodeState.RECEIVING)
        sender.write_layer(0)
        if end == "cancels":
            await receivers[1].cancel("the user left")
        elif end == "closes":
            await ranks.decode[1].endpoint.close()
        else:
            await ranks.decode[1].engine.close()
        with pytest.raises((TransferCancelled, PeerError)):
            await asyncio.wait_for(sender.wait(), PATIENCE)
        with pytest.raises(TransferCancelled, match="cancelled by prefill worker 'p'"):
            await asyncio.wait_for(receivers[0].wait(), PATIENCE)
        assert ranks.decode[0].pool.num_free == NUM_BLOCKS


async def test_a_decode_rank_that_gives_up_after_its_part_ends_the_wait_for_another(
    fabric: str,
) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ticket = ranks.ticket()
        [sender] = await ranks.requests(ticket, stack)
        receiver = await ranks.decode[0].endpoint.decode_session(
            ticket, ranks.addresses, LAYOUT.blocks_for(TOKENS)
        )
        for layer in range(LAYOUT.num_layers):
            sender.write_layer(layer)
        finishing = asyncio.create_task(sender.finish())
        await asyncio.wait_for(receiver.wait(), PATIENCE)
        assert sender.state is PrefillState.WAITING
        await receiver.cancel("the user left")
        with pytest.raises(TransferCancelled, match="the user left"):
            await asyncio.wait_for(finishing, PATIENCE)


@pytest.mark.parametrize(("prefill", "decode"), [((1, 1), (2, 1)), ((1, 2), (1, 1))])
async def test_every_prefill_rank_frees_what_it_keeps_for_a_decode_worker_that_dies(
    fabric: str, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    async with (
        fleet(fabric, sized(LAYOUT, *prefill), sized(LAYOUT, *decode)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ticket = ranks.ticket()
        senders = await ranks.requests(ticket, stack)
        for rank in ranks.decode:
            await rank.endpoint.keep(ticket, ranks.addresses)
        await eventually(lambda: all(len(s._met) == len(ranks.decode) for s in senders))
        await ranks.decode[-1].engine.close()
        for sender in senders:
            with pytest.raises(PeerError):
                await asyncio.wait_for(sender.wait(), PATIENCE)


async def test_a_decode_rank_that_fails_before_the_request_ends_the_offers_of_the_others(
    fabric: str,
) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        [prefill] = ranks.prefill
        receivers = await ranks.offers(ranks.ticket())
        ticket = receivers[0].ticket.token
        await eventually(lambda: early_offers(prefill) == 2)
        await receivers[1].cancel("the user left")
        with pytest.raises(
            TransferCancelled, match=r"refused by prefill worker 'p'.*the user left"
        ):
            await asyncio.wait_for(receivers[0].wait(), PATIENCE)
        assert early_offers(prefill) == 0
        with pytest.raises(TransferCancelled, match="the user left"):
            await ranks.requests(ticket, stack)


async def test_prefill_waits_for_every_decode_rank_within_its_lease(fabric: str) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        ticket = ranks.ticket()
        [sender] = await ranks.requests(ticket, stack)
        receiver = await ranks.decode[0].endpoint.decode_session(ticket, ranks.addresses, 3)
        for layer in range(LAYOUT.num_layers):
            sender.write_layer(layer)
        finishing = asyncio.create_task(sender.finish())
        await receiver.wait()  # this rank has everything, and keeps it
        receiver.take().release()
        sender._lease.renew(0.01)
        text = "decode worker 'd' made no offer for its ranks 1 within 0.01 s"
        with pytest.raises(LeaseExpired, match=text):
            await finishing


async def test_addresses_that_do_not_fit_the_ranks_are_refused(fabric: str) -> None:
    async with fleet(fabric, sized(LAYOUT, 2, 1), LAYOUT) as ranks:
        [decode] = ranks.decode
        ticket, (first, second) = ranks.ticket(), ranks.addresses
        for addresses, text in (
            (first, r"1 engine addresses of prefill worker 'p' with its 2 ranks; 0, 1 "),
            ([first], r"1 engine addresses"),
            ([first, second, first], r"3 engine addresses"),
            ([second, first], f"the engine at {second} is rank 1 of 'p' and not rank 0"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                await decode.endpoint.decode_session(ticket, addresses, 3)
        assert decode.pool.num_free == NUM_BLOCKS


async def test_a_decode_rank_meets_only_the_prefill_ranks_that_write_to_it(fabric: str) -> None:
    async with fleet(fabric, sized(LAYOUT, 2, 1), sized(LAYOUT, 2, 1)) as ranks:
        ticket = ranks.ticket()
        receivers = [
            await rank.endpoint.decode_session(ticket, address, 3)
            for rank, address in zip(ranks.decode, ranks.addresses, strict=True)
        ]
        await eventually(lambda: [early_offers(rank) for rank in ranks.prefill] == [1, 1])
        for receiver in receivers:
            await receiver.cancel("enough")
        with pytest.raises(InvalidArgument, match="1 engine addresses"):
            await ranks.decode[0].endpoint.decode_session(ranks.ticket(), ranks.addresses[1], 3)


async def test_a_rank_lost_while_another_is_met_leaves_no_session_behind(
    fabric: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(fabric, sized(LAYOUT, 2, 1), LAYOUT) as ranks:
        [decode] = ranks.decode
        connect = decode.engine.connect

        async def connect_and_lose_the_first(address: str, timeout: float = 2.0) -> Peer:
            peer = await connect(address, timeout)
            if address == ranks.addresses[1]:
                [first] = [each for each in decode.engine.peers if each is not peer]
                first.fence()
                await eventually(lambda: not first.alive)
            return peer

        monkeypatch.setattr(decode.engine, "connect", connect_and_lose_the_first)
        with pytest.raises(PeerError):
            await ranks.offers(ranks.ticket())
        assert not decode.endpoint._decodes
