"""Two workers of one rank each whose caches differ in layout, over real engines."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    InvalidArgument,
    LeaseExpired,
    ProtocolError,
    TransferCancelled,
    TransferRefused,
)
from kvxfer.kv.block_pool import BlockIds, BlockState
from kvxfer.kv.cache import KvCache, permute_on_host
from kvxfer.kv.session_state import DecodeState, PrefillState
from kvxfer.layout import HeadOrder, KvLayout
from verify.polling import PATIENCE, eventually

from .workers import LAYOUT, NUM_BLOCKS, Worker, heads_by_token, make_ticket, send, worker

pytestmark = pytest.mark.native

HND: dict[str, Any] = {"order": "HND"}
JOINED = dataclasses.replace(LAYOUT, kv="joined")
MLA = KvLayout(num_layers=6, num_kv_heads=1, head_size=64, dtype="uint8", block_size=4, mla=True)


async def transfer(
    prefill: Worker, decode: Worker, tokens: int, rng: random.Random, first_block: int = 0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Moves a prompt. Returns what its blocks held at prefill and hold at decode, by token from
    `first_block` of decode on as far as both have room; checks that no other block of decode has
    changed."""
    ticket = make_ticket(prefill, decode)
    ours, theirs = prefill.cache.layout, decode.cache.layout
    everything = range(decode.pool.num_blocks)
    before = decode.contents(everything)
    with prefill.scatter(rng, prefill.pool.num_blocks - 4), decode.scatter(rng, 12):
        sending = asyncio.create_task(sent_by(prefill, ticket, ours.blocks_for(tokens), rng))
        async with decode.endpoint.decode_session(
            ticket,
            prefill.engine.address,
            theirs.blocks_for(tokens) - first_block,
            first_block=first_block,
        ) as session:
            assert await session.wait() == b"tail"
            with session.take() as hold:
                table = hold.ids.tolist()
                received = heads_by_token(decode.cache, table)
        sent = await sending
    after = decode.contents(everything)
    of_plane = len(everything)
    for index, (was, now) in enumerate(zip(before, after, strict=True)):
        assert was == now or index % of_plane in table
    first = first_block * theirs.block_size
    sent = sent[:, :, first:]
    room = min(sent.shape[2], received.shape[2])
    assert room >= tokens - first
    return sent[:, :, :room], received[:, :, :room]


async def sent_by(
    prefill: Worker, ticket: str, num_blocks: int, rng: random.Random
) -> np.ndarray[Any, Any]:
    with prefill.pool.hold(num_blocks) as hold:
        table = hold.ids.tolist()
    # send() takes these blocks again, as they are on top of the pool.
    await send(prefill, ticket, num_blocks, rng)
    return heads_by_token(prefill.cache, table)


@pytest.mark.parametrize(
    ("layout", "prefill", "decode"),
    [
        (LAYOUT, {"block_size": 2}, {"block_size": 8}),
        (LAYOUT, {"block_size": 8}, {"block_size": 2}),
        (LAYOUT, {"block_size": 4}, {"block_size": 6}),
        (LAYOUT, {"block_size": 6}, {"block_size": 4}),
        (LAYOUT, {}, HND),
        (LAYOUT, HND, {}),
        (LAYOUT, {}, {"kv": "interleaved"}),
        (LAYOUT, {"kv": "interleaved"}, {}),
        (LAYOUT, HND, {"block_size": 6, "kv": "interleaved"}),
        (LAYOUT, {"block_size": 6}, {"kv": "interleaved", **HND}),
        (JOINED, {"block_size": 6}, HND),
        (JOINED, HND, {"block_size": 2}),
        (MLA, {"block_size": 3}, {"block_size": 5}),
    ],
    ids=str,
)
async def test_every_token_gets_to_its_place(
    fabric: str,
    rng: random.Random,
    layout: KvLayout,
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    ours, theirs = (dataclasses.replace(layout, **change) for change in (prefill, decode))
    async with worker("p", fabric, layout=ours) as p, worker("d", fabric, layout=theirs) as d:
        for tokens in (1, 11, rng.randint(1, 24)):
            sent, received = await transfer(p, d, tokens, rng)
            np.testing.assert_array_equal(received, sent)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(4, 4), (8, 2), (2, 8), (6, 4), (4, 6)], ids=lambda size: f"b{size}"
)
async def test_blocks_that_decode_already_has_are_left_out(
    fabric: str, rng: random.Random, prefill: int, decode: int
) -> None:
    ours = dataclasses.replace(LAYOUT, block_size=prefill)
    theirs = dataclasses.replace(LAYOUT, block_size=decode, order="HND")
    async with worker("p", fabric, layout=ours) as p, worker("d", fabric, layout=theirs) as d:
        for first_block in range(theirs.blocks_for(19)):
            sent, received = await transfer(p, d, 19, rng, first_block)
            np.testing.assert_array_equal(received, sent)


async def test_a_first_block_behind_the_prompt_is_refused(fabric: str) -> None:
    async with worker("p", fabric) as p, worker("d", fabric) as d:
        ticket = make_ticket(p, d)
        with pytest.raises(InvalidArgument, match="first_block is -1; pass 0 or more"):
            await d.endpoint.decode_session(ticket, p.engine.address, 1, first_block=-1)
        with p.pool.hold(3) as hold:
            session = await p.endpoint.prefill_session(ticket, hold)
            receiver = await d.endpoint.decode_session(ticket, p.engine.address, 2, first_block=2)
            text = r"offers 2 blocks after 2 that it has for the 3 blocks of prefill"
            with pytest.raises(InvalidArgument, match=text):
                await asyncio.wait_for(session.wait(), PATIENCE)
            with pytest.raises(TransferRefused, match=text):
                await asyncio.wait_for(receiver.wait(), PATIENCE)


async def test_a_cache_that_cannot_reorder_heads_gets_them_in_order(
    fabric: str, rng: random.Random
) -> None:
    theirs = dataclasses.replace(LAYOUT, order="HND")
    async with worker("p", fabric) as p, worker("d", fabric, layout=theirs, permute=None) as d:
        np.testing.assert_array_equal(*await transfer(p, d, 11, rng))


async def test_heads_in_memory_of_a_gpu_are_not_reordered_on_the_host(
    fabric: str, rng: random.Random
) -> None:
    theirs = dataclasses.replace(LAYOUT, order="HND")
    async with worker("p", fabric) as p, worker("d", fabric, layout=theirs) as d:
        d.cache.gpu = 0
        text = "memory of GPU 0: permute_on_host cannot reorder heads there; pass permute=None"
        with pytest.raises(InvalidArgument, match=text):
            await d.endpoint.decode_session(make_ticket(p, d), p.engine.address, 2)
        with pytest.raises(InvalidArgument, match=text):
            permute_on_host(d.cache, np.zeros(1, np.int32), "NHD")
    async with worker("p", fabric) as p, worker("d", fabric, layout=theirs, permute=None) as d:
        d.cache.gpu = 0
        np.testing.assert_array_equal(*await transfer(p, d, 11, rng))


async def test_numbers_of_blocks_that_no_prompt_has_on_both_sides_are_refused(
    fabric: str, rng: random.Random
) -> None:
    theirs = dataclasses.replace(LAYOUT, block_size=8)
    async with worker("p", fabric) as p, worker("d", fabric, layout=theirs) as d:
        ticket = make_ticket(p, d)
        with p.pool.hold(3) as hold:
            session = await p.endpoint.prefill_session(ticket, hold)
            receiver = await d.endpoint.decode_session(ticket, p.engine.address, 3)
            text = r"offers 3 blocks for the 3 blocks of prefill \(8 and 4 tokens each\)"
            with pytest.raises(InvalidArgument, match=text):
                await asyncio.wait_for(session.wait(), PATIENCE)
            with pytest.raises(TransferRefused, match=text):
                await asyncio.wait_for(receiver.wait(), PATIENCE)


class SlowPermute:
    """A permutation that waits for the test, and then may fail."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.blocks: list[int] = []

    def __call__(self, cache: KvCache, blocks: BlockIds, arrived: HeadOrder) -> None:
        self.blocks = blocks.tolist()
        self.begun.set()
        assert self.go_on.wait(2 * PATIENCE)
        if self.error is not None:
            raise self.error
        permute_on_host(cache, blocks, arrived)


@pytest.mark.parametrize("end", ["in order", "cancelled", "lease", "failed"])
async def test_blocks_are_neither_taken_nor_freed_while_their_heads_are_reordered(
    fabric: str, rng: random.Random, end: str
) -> None:
    permute = SlowPermute()
    theirs = dataclasses.replace(LAYOUT, order="HND")
    async with worker("d", fabric, layout=theirs, permute=permute) as d:
        async with worker("p", fabric) as p:
            ticket = make_ticket(p, d)
            receiver = await d.endpoint.decode_session(ticket, p.engine.address, 3)
            await send(p, ticket, 3, rng)
            await eventually(permute.begun.is_set)
            assert receiver.state is DecodeState.COMPLETE
            assert d.pool.counts()[BlockState.RECEIVING] == 3
            waiting = asyncio.create_task(receiver.wait())
            cancelling = None
            if end == "cancelled":
                cancelling = receiver.cancel("the user left")
            elif end == "lease":
                receiver._lease.renew(0.01)
                await eventually(lambda: receiver.state is DecodeState.CANCELLED)
            elif end == "failed":
                permute.error = RuntimeError("the device is gone")
        # The end of prefill changes nothing.
        await eventually(lambda: not list(d.endpoint._connections))
        assert not waiting.done()
        assert d.pool.counts()[BlockState.RECEIVING] == 3
        permute.go_on.set()
        if end == "in order":
            assert await asyncio.wait_for(waiting, PATIENCE) == b"tail"
            with receiver.take() as hold:
                assert hold.ids.tolist() == permute.blocks
            return
        error, text = {
            "cancelled": (TransferCancelled, "the user left"),
            "lease": (LeaseExpired, "the blocks were not checked and put in order within 0.01 s"),
            "failed": (
                ProtocolError,
                r"could not be checked and put in order: RuntimeError\('the device",
            ),
        }[end]
        with pytest.raises(error, match=text):
            await asyncio.wait_for(waiting, PATIENCE)
        if cancelling is not None:
            await asyncio.wait_for(cancelling, PATIENCE)
        assert d.pool.num_free == NUM_BLOCKS
        with pytest.raises(error, match=text):
            receiver.take()


async def test_prefill_is_done_before_decode_has_reordered_the_heads(
    fabric: str, rng: random.Random
) -> None:
    permute = SlowPermute()
    theirs = dataclasses.replace(LAYOUT, order="HND")
    async with (
        worker("p", fabric) as p,
        worker("d", fabric, layout=theirs, permute=permute) as d,
    ):
        ticket = make_ticket(p, d)
        receiver = await d.endpoint.decode_session(ticket, p.engine.address, 2)
        with p.pool.hold(2) as hold:
            session = await p.endpoint.prefill_session(ticket, hold)
            for layer in range(LAYOUT.num_layers):
                session.write_layer(layer)
            await asyncio.wait_for(session.finish(), PATIENCE)
        assert session.state is PrefillState.DELIVERED
        permute.go_on.set()
        await receiver.wait()
        receiver.take().release()
