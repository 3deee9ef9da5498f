"""Instances of several ranks, each rank with an engine and an endpoint of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    InvalidArgument,
    LeaseExpired,
    PeerError,
    TransferCancelled,
)
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.layout import KvLayout
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.session_state import DecodeState, PrefillState

from .workers import (
    NUM_BLOCKS,
    Worker,
    early_offers,
    eventually,
    heads_by_token,
    make_ticket,
    worker,
)

TOKENS = 11
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_size=16, dtype="bfloat16", block_size=4)
MLA = dataclasses.replace(LAYOUT, num_kv_heads=1, mla=True)


class Fleet:
    """The ranks of a prefill and a decode instance."""

    def __init__(self, prefill: list[Worker], decode: list[Worker]) -> None:
        self.prefill, self.decode = prefill, decode

    @property
    def addresses(self) -> list[str]:
        return [rank.engine.address for rank in self.prefill]

    def ticket(self) -> str:
        return make_ticket(self.prefill[0], self.decode[0])

    def fill(self, cache: np.ndarray[Any, Any]) -> None:
        """The cache of a prompt, by (layer, K or V, token, head, byte), into blocks 0, 1, …"""
        for rank in self.prefill:
            layout = rank.cache.layout
            put(rank, list(range(layout.blocks_for(TOKENS))), part_of(cache, layout))

    async def offers(self, ticket: str) -> list[DecodeSession]:
        return [
            await rank.endpoint.decode_session(
                ticket, self.addresses, rank.cache.layout.blocks_for(TOKENS)
            )
            for rank in self.decode
        ]

    async def requests(self, ticket: str, stack: contextlib.AsyncExitStack) -> list[PrefillSession]:
        sessions = []
        for rank in self.prefill:
            hold = stack.enter_context(rank.pool.hold(rank.cache.layout.blocks_for(TOKENS)))
            sessions.append(await rank.endpoint.prefill_session(ticket, hold))
        return sessions


def part_of(cache: np.ndarray[Any, Any], layout: KvLayout) -> np.ndarray[Any, Any]:
    """A rank's part of a whole cache."""
    layers = slice(layout.first_layer, layout.first_layer + layout.layers_per_rank)
    heads = slice(layout.first_head, layout.first_head + layout.heads_per_rank)
    return cache[layers, :, :, heads]


def put(rank: Worker, blocks: list[int], part: np.ndarray[Any, Any]) -> None:
    """A rank's part of a cache into its blocks."""
    layout = rank.cache.layout
    vectors = part.shape[1]
    size = layout.block_bytes // vectors
    for layer, vector in np.ndindex(part.shape[:2]):
        name = layout.parts[vector] if len(layout.parts) == 2 else layout.parts[0]
        plane = np.frombuffer(rank.cache.buffer(layer, name), np.uint8)
        tokens = part[layer, vector]
        for index, block in enumerate(blocks):
            begin = index * layout.block_size
            some = np.zeros((layout.block_size, *tokens.shape[1:]), np.uint8)
            some[: len(tokens) - begin] = tokens[begin : begin + layout.block_size]
            if layout.order == "HND":
                some = some.swapaxes(0, 1)
            at = block * layout.part_bytes + (vector * size if len(layout.parts) == 1 else 0)
            plane[at : at + size] = some.reshape(-1)


@contextlib.asynccontextmanager
async def fleet(
    fabric: str, prefill: KvLayout, decode: KvLayout, **options: Any
) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:

        async def ranks(name: str, layout: KvLayout) -> list[Worker]:
            return [
                await stack.enter_async_context(
                    worker(
                        f"{name}{rank}",
                        fabric,
                        layout=layout.of_rank(rank),
                        instance_id=name,
                        **options,
                    )
                )
                for rank in range(layout.num_ranks)
            ]

        yield Fleet(await ranks("p", prefill), await ranks("d", decode))


def sized(layout: KvLayout, tp: int, pp: int, **changes: Any) -> KvLayout:
    return dataclasses.replace(layout, tp_size=tp, pp_size=pp, **changes)


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
        # more replicas than layers: one of them has nothing to send, and is told
        (sized(MLA, 3, 1, num_layers=2), sized(MLA, 1, 1, num_layers=2)),
    ],
    ids=lambda layout: f"{'mla-' * layout.mla}tp{layout.tp_size}pp{layout.pp_size}-{layout.order}",
)
async def test_every_rank_gets_its_part(
    fabric: str, rng: random.Random, prefill: KvLayout, decode: KvLayout
) -> None:
    shape = (prefill.num_layers, 1 if prefill.mla else 2, TOKENS, prefill.num_kv_heads)
    nbytes = int(np.prod(shape)) * prefill.vector_bytes
    cache = np.frombuffer(rng.randbytes(nbytes), np.uint8).reshape(*shape, prefill.vector_bytes)
    async with fleet(fabric, prefill, decode) as ranks, contextlib.AsyncExitStack() as stack:
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
        # The first rank has the tail; a stage that it does not write to hears of none.
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
async def test_when_one_prefill_rank_fails_decode_and_the_other_rank_hear_of_it(
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
            await asyncio.wait_for(receiver.wait(), 1)
        if end == "cancels":
            assert "cancelled by rank 1 of prefill worker 'p'" in str(caught.value)
            assert "out of memory" in str(caught.value)
        with pytest.raises(TransferCancelled, match="cancelled by decode worker 'd'"):
            await asyncio.wait_for(senders[0].wait(), 1)
        assert ranks.decode[0].pool.num_free == NUM_BLOCKS
        await eventually(lambda: receiver.state in (DecodeState.CANCELLED, DecodeState.FAILED))


@pytest.mark.parametrize("end", ["cancels", "closes", "dies"])
async def test_when_one_decode_rank_fails_prefill_and_the_other_rank_hear_of_it(
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
            await asyncio.wait_for(sender.wait(), 1)
        with pytest.raises(TransferCancelled, match="cancelled by prefill worker 'p'"):
            await asyncio.wait_for(receivers[0].wait(), 1)
        assert ranks.decode[0].pool.num_free == NUM_BLOCKS


async def test_a_decode_rank_that_fails_before_the_request_ends_the_offers_of_the_others(
    fabric: str,
) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1)) as ranks,
        contextlib.AsyncExitStack() as stack,
    ):
        [prefill] = ranks.prefill
        receivers = await ranks.offers(ranks.ticket())
        ticket = receivers[0]._token
        await eventually(lambda: early_offers(prefill) == 2)
        await receivers[1].cancel("the user left")
        with pytest.raises(
            TransferCancelled, match=r"refused by prefill worker 'p'.*the user left"
        ):
            await asyncio.wait_for(receivers[0].wait(), 1)
        assert early_offers(prefill) == 0
        with pytest.raises(TransferCancelled, match="the user left"):
            await ranks.requests(ticket, stack)


async def test_prefill_waits_for_every_decode_rank_within_its_lease(fabric: str) -> None:
    async with (
        fleet(fabric, LAYOUT, sized(LAYOUT, 2, 1), lease_seconds=0.5) as ranks,
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
        text = "decode worker 'd' made no offer for its ranks 1 within 0.5 s"
        with pytest.raises(LeaseExpired, match=text):
            await finishing


async def test_addresses_that_do_not_fit_the_ranks_are_refused(fabric: str) -> None:
    async with fleet(fabric, sized(LAYOUT, 2, 1), LAYOUT) as ranks:
        [decode] = ranks.decode
        ticket, (first, second) = ranks.ticket(), ranks.addresses
        for addresses, text in (
            (first, r"1 engine addresses of prefill worker 'p' with its 2 ranks, of which 0, 1 "),
            ([first], r"1 engine addresses"),
            ([first, second, first], r"3 engine addresses"),
            ([second, first], f"the engine at {second} is rank 1 of 'p' and not rank 0"),
        ):
            with pytest.raises(InvalidArgument, match=text):
                await decode.endpoint.decode_session(ticket, addresses, 3)
        assert decode.pool.num_free == NUM_BLOCKS


async def test_a_rank_that_gets_nothing_from_a_prefill_rank_is_not_met_by_it(fabric: str) -> None:
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


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (sized(LAYOUT, 2, 2), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 1, 1), sized(LAYOUT, 2, 2)),
        (sized(LAYOUT, 2, 1), sized(LAYOUT, 1, 2, order="HND", block_size=6)),
    ],
    ids=["4 to 1", "1 to 4", "2 to 2"],
)
async def test_whatever_happens_to_a_rank_no_block_stays_taken_and_no_wrong_byte_is_taken(
    fabric: str, rng: random.Random, prefill: KvLayout, decode: KvLayout
) -> None:
    """Many transfers at once, most of them with a rank that is cancelled at a random moment."""
    nbytes = LAYOUT.num_layers * 2 * TOKENS * LAYOUT.num_kv_heads * LAYOUT.vector_bytes
    shape = (LAYOUT.num_layers, 2, TOKENS, LAYOUT.num_kv_heads, LAYOUT.vector_bytes)
    room = asyncio.Semaphore(5)
    ends: list[str] = []

    async def one(ranks: Fleet, seed: int) -> None:
        choices = random.Random(seed)
        sessions: list[PrefillSession | DecodeSession] = []
        ticket = ranks.ticket()
        cache = np.frombuffer(choices.randbytes(nbytes), np.uint8).reshape(shape)

        async def pause() -> None:
            for _ in range(choices.randrange(10)):
                await asyncio.sleep(0)

        async def send(rank: Worker) -> None:
            await pause()
            layout = rank.cache.layout
            with rank.pool.hold(layout.blocks_for(TOKENS)) as hold:
                put(rank, hold.ids.tolist(), part_of(cache, layout))
                async with await rank.endpoint.prefill_session(ticket, hold) as session:
                    sessions.append(session)
                    for layer in range(layout.layers_per_rank):
                        session.write_layer(layer)
                        await pause()
                    await session.finish(b"tail")

        async def receive(rank: Worker) -> None:
            await pause()
            layout = rank.cache.layout
            async with await rank.endpoint.decode_session(
                ticket, ranks.addresses, layout.blocks_for(TOKENS)
            ) as session:
                sessions.append(session)
                assert await session.wait() == b"tail"
                with session.take() as hold:
                    found = heads_by_token(rank.cache, hold.ids.tolist())[:, :, :TOKENS]
                    np.testing.assert_array_equal(found, part_of(cache, layout))

        async with room:
            tasks = [asyncio.create_task(send(rank)) for rank in ranks.prefill]
            tasks += [asyncio.create_task(receive(rank)) for rank in ranks.decode]
            choices.shuffle(tasks)
            mishap = choices.random() < 0.7
            if mishap:
                for _ in range(choices.randrange(40)):
                    await asyncio.sleep(0)
                if sessions and choices.random() < 0.5:
                    await choices.choice(sessions).cancel("mishap")
                else:
                    tasks[0].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [failure for failure in found if failure is not None]
        allowed = (TransferCancelled, LeaseExpired, asyncio.CancelledError)
        assert all(isinstance(failure, allowed) for failure in failures), failures
        assert mishap or not failures
        ends.append("failed" if failures else "done")

    async with fleet(fabric, prefill, decode, lease_seconds=2.0) as ranks:
        await asyncio.gather(*(one(ranks, rng.getrandbits(32)) for _ in range(40)))
    assert ends.count("done") >= 5
    assert ends.count("failed") >= 5
