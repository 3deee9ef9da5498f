"""Transfers whose blocks are checked before they are used."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer.errors import (
    ChecksumMismatch,
    InvalidArgument,
    OutOfBounds,
    ProtocolError,
    TransferRefused,
)
from kvxfer.kv.connection import Connection
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.messages import Done
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.layout import KvLayout
from verify.polling import PATIENCE

from .ranks import TOKENS
from .test_different_layouts import HND, MLA, transfer
from .workers import KEY, LAYERS, LAYOUT, Worker, accepted, make_ticket, receive, send, worker

pytestmark = pytest.mark.native


@pytest.mark.parametrize("where", ["prefill", "decode", "both"])
async def test_one_side_that_wants_checksums_is_enough(
    fabric: str, rng: random.Random, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Done] = []
    say = Connection.send

    def listen(pair: Connection, message: Any) -> None:
        sent.extend([message] if isinstance(message, Done) else [])
        say(pair, message)

    monkeypatch.setattr(Connection, "send", listen)
    async with (
        worker("p", fabric, checksums=where != "decode") as p,
        worker("d", fabric, checksums=where != "prefill") as d,
    ):
        for blocks in (1, 5):
            ticket = make_ticket(p, d)
            ours, theirs = await asyncio.gather(
                send(p, ticket, blocks, rng), receive(p, d, ticket, blocks)
            )
            assert ours == theirs
    checksums = [done.checksum for done in sent]
    assert [checksum and checksum.blocks for checksum in checksums] == [1, 5]


async def test_without_checksums_none_is_computed(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    p, d = pair
    ticket = make_ticket(p, d)
    await asyncio.gather(send(p, ticket, 2, rng), receive(p, d, ticket, 2))
    pairs = [*p.endpoint._connections, *d.endpoint._connections]
    assert [each.checksums for each in pairs] == [False, False]


@pytest.mark.parametrize(
    ("layout", "prefill", "decode"),
    [
        (LAYOUT, {"block_size": 2}, {"block_size": 8}),
        (LAYOUT, {"block_size": 6}, {"block_size": 4}),
        (LAYOUT, {}, HND),
        (LAYOUT, HND, {"block_size": 6, "kv": "interleaved"}),
        (MLA, {"block_size": 3}, {"block_size": 5}),
    ],
    ids=str,
)
async def test_every_layout_has_the_same_sum_on_both_sides(
    fabric: str,
    rng: random.Random,
    layout: KvLayout,
    prefill: dict[str, Any],
    decode: dict[str, Any],
) -> None:
    ours, theirs = (dataclasses.replace(layout, **change) for change in (prefill, decode))
    async with (
        worker("p", fabric, layout=ours) as p,
        worker("d", fabric, layout=theirs, checksums=True) as d,
    ):
        for first_block in range(theirs.blocks_for(TOKENS)):
            np.testing.assert_array_equal(*await transfer(p, d, TOKENS, rng, first_block))


async def damaged(p: Worker, d: Worker, rng: random.Random, bit: int) -> BaseException:
    """Flips a bit of a transfer in decode's memory; returns decode's error."""
    ticket = make_ticket(p, d)
    with p.pool.hold(4) as hold:
        p.fill(hold.ids.tolist(), rng)
        sending = await p.endpoint.prefill_session(ticket, hold)
        async with d.endpoint.decode_session(ticket, p.engine.address, 4) as session:
            await accepted(session)
            for layer in range(LAYERS):
                sending.write_layer(layer)
            await asyncio.gather(*sending._operations())
            layer, part = rng.randrange(LAYERS), rng.choice(LAYOUT.parts)
            block = int(rng.choice(session._blocks.ids))
            at = block * LAYOUT.part_bytes + rng.randrange(LAYOUT.part_bytes)
            d.cache.buffer(layer, part)[at] ^= bit
            await sending.finish()
            with pytest.raises(Exception) as caught:
                await asyncio.wait_for(session.wait(), PATIENCE)
            return caught.value


async def test_a_damaged_block_is_found_and_not_used(fabric: str, rng: random.Random) -> None:
    async with worker("p", fabric) as p, worker("d", fabric, checksums=True) as d:
        for bit in range(8):
            error = await damaged(p, d, rng, 1 << bit)
            assert isinstance(error, ChecksumMismatch)
            assert "what 'p' wrote has the checksum" in str(error)
            assert d.pool.num_free == d.pool.num_blocks
        # The next transfer of the pair succeeds.
        ticket = make_ticket(p, d)
        ours, theirs = await asyncio.gather(send(p, ticket, 3, rng), receive(p, d, ticket, 3))
        assert ours == theirs


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "'p' sent no checksum"),
        ({"blocks": 2**40}, f"the checksum of {2**40} blocks for 3 here"),
        ({"blocks": -1}, "the checksum of -1 blocks for 3 here"),
        ({"value": 5}, "has the checksum .* here and 0000000000000005 there"),
    ],
    ids=str,
)
async def test_an_invalid_checksum_is_refused(
    fabric: str,
    rng: random.Random,
    change: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say = Connection.send

    def lie(pair: Connection, message: Any) -> None:
        if isinstance(message, Done):
            assert message.checksum is not None
            checksum = msgspec.structs.replace(message.checksum, **change) if change else None
            message = msgspec.structs.replace(message, checksum=checksum)
        say(pair, message)

    async with worker("p", fabric) as p, worker("d", fabric, checksums=True) as d:
        monkeypatch.setattr(Connection, "send", lie)
        ticket = make_ticket(p, d)
        async with d.endpoint.decode_session(ticket, p.engine.address, 3) as session:
            await send(p, ticket, 3, rng)
            with pytest.raises((ProtocolError, ChecksumMismatch), match=text):
                await asyncio.wait_for(session.wait(), PATIENCE)


async def test_blocks_in_memory_of_a_gpu_have_no_checksums(fabric: str) -> None:
    async with worker("p", fabric) as p, worker("d", fabric, checksums=True) as d:
        text = "the KvCache is memory of GPU 0: checksums, which '{}' wants, need host memory"
        p.cache.gpu = 0
        ticket = make_ticket(p, d)
        with p.pool.hold(2) as hold:
            sending = await p.endpoint.prefill_session(ticket, hold)
            receiving = await d.endpoint.decode_session(ticket, p.engine.address, 2)
            with pytest.raises(InvalidArgument, match=text.format("d")):
                await asyncio.wait_for(sending.wait(), PATIENCE)
            with pytest.raises(TransferRefused, match=text.format("d")):
                await asyncio.wait_for(receiving.wait(), PATIENCE)
        with pytest.raises(InvalidArgument, match=text.format("d")):
            await p.endpoint.decode_session(make_ticket(d, p), d.engine.address, 2)
        identity, options = KvIdentity("p", KEY, 1), KvOptions(checksums=True)
        with pytest.raises(InvalidArgument, match="GPU 0: checksums need host memory; pass check"):
            KvEndpoint(p.engine, p.cache, p.pool, identity, options)


async def test_a_region_sums_only_what_is_in_it(fabric: str) -> None:
    async with worker("p", fabric) as p:
        region = p.cache.planes[0][0].region
        for at in (-1, region.nbytes - 15, 2**62):
            with pytest.raises(OutOfBounds, match=f"a run of 16 bytes at {at} leaves its region"):
                region.checksum(np.array([0, at]), np.array([0, 1]), 16)
