"""Transfers between caches of several KV cache groups, each with its own blocks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import AsyncIterator

import pytest

from kvxfer.connectors.engine_blocks import EngineBlocks
from kvxfer.errors import InvalidArgument, LayoutMismatch, ProtocolError, TransferCancelled
from kvxfer.kv.blocks import ABSENT
from kvxfer.kv.connection import grant_ranges
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout
from verify.polling import eventually

from .workers import (
    GROUPED,
    LAYERS,
    LAYOUT,
    NUM_BLOCKS,
    Worker,
    heads_by_token,
    make_ticket,
    worker,
)

pytestmark = pytest.mark.native

Table = list[list[int]]


@pytest.fixture(autouse=True)
def causes_are_waited_for() -> None:
    """Overrides the fixture of conftest.py, as the errors here are causes themselves."""


@pytest.fixture(params=[False, True], ids=["plain", "checked"])
async def grouped(
    fabric: str, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Worker, Worker]]:
    async with (
        worker("prefill", fabric, layout=GROUPED, checksums=request.param) as prefill,
        worker("decode", fabric, layout=GROUPED) as decode,
    ):
        yield prefill, decode


def blocks(table: Table) -> EngineBlocks:
    made = EngineBlocks(len(table[0]), len(table))
    made.fill(table)
    return made


def of_layer(side: Worker, layer: int, block: int) -> list[bytes]:
    size = side.cache.layout.part_bytes
    planes = [side.cache.buffer(layer, part) for part in side.cache.layout.parts]
    return [bytes(plane[block * size : (block + 1) * size]) for plane in planes]


@pytest.mark.parametrize("offered", ["before", "after"])
@pytest.mark.parametrize(
    ("source", "target", "first"),
    [
        ([[3, 1, 4], [5, 9, 2]], [[6, 8, 7], [10, 11, 0]], 0),
        ([[3, 1, 4], [ABSENT, 9, 2]], [[6, 8, 7], [ABSENT, 11, 0]], 0),
        ([[3, 1, 4], [ABSENT, 9, 2]], [[6, 8, 7], [ABSENT, ABSENT, 0]], 0),
        ([[3, 1, 4, 12], [ABSENT, ABSENT, 9, 2]], [[6, 8], [ABSENT, 0]], 2),
    ],
)
async def test_each_group_arrives_in_its_own_blocks(
    grouped: tuple[Worker, Worker],
    rng: random.Random,
    source: Table,
    target: Table,
    first: int,
    offered: str,
) -> None:
    prefill, decode = grouped
    prefill.fill(range(NUM_BLOCKS), rng)
    ticket = make_ticket(prefill, decode)
    whole = len(source[0])
    ours = EngineBlocks(whole, 2)
    receiver = None
    address = prefill.engine.address
    if offered == "before":
        receiver = await decode.endpoint.decode_session(
            ticket, address, blocks(target), first_block=first
        )
    async with prefill.endpoint.prefill_session(ticket, ours) as session:
        for until in (1, whole):
            ours.fill([row[:until] for row in source])
            for layer in range(LAYERS):
                session.write_layer(layer, until)
        if receiver is None:
            receiver = await decode.endpoint.decode_session(
                ticket, address, blocks(target), first_block=first
            )
        await session.finish()
        await receiver.wait()
        wanted = {
            group: {to: source[group][first + at] for at, to in enumerate(row) if to != ABSENT}
            for group, row in enumerate(target)
        }
        moved = sum(len(of) * LAYERS // 2 for of in wanted.values()) * GROUPED.block_bytes
        assert session.nbytes == receiver.nbytes == moved
    receiver.take()
    nothing = [bytes(GROUPED.part_bytes)] * 2
    for layer in range(LAYERS):
        of_group = wanted[GROUPED.layer_groups[layer]]
        for block in range(NUM_BLOCKS):
            there = of_layer(decode, layer, block)
            if block in of_group:
                assert there == of_layer(prefill, layer, of_group[block])
            else:
                assert there == nothing, f"layer {layer}: block {block} is of the other group"


@pytest.mark.parametrize("offered", ["before", "after"])
async def test_a_block_that_prefill_does_not_have_is_refused_by_name(
    grouped: tuple[Worker, Worker], rng: random.Random, offered: str
) -> None:
    prefill, decode = grouped
    prefill.fill(range(NUM_BLOCKS), rng)
    ticket = make_ticket(prefill, decode)
    ours, theirs = blocks([[3, 1], [ABSENT, 2]]), blocks([[6, 8], [7, 0]])
    named = "room for block 0 of the prompt, which prefill does not have"
    if offered == "before":
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, theirs)
    session = await prefill.endpoint.prefill_session(ticket, ours)
    if offered == "before":
        await eventually(lambda: session.fabric is not None)
        session.write_layer(0)  # a layer of the group that has the block
        with pytest.raises(ProtocolError, match=named):
            session.write_layer(1)
    else:
        for layer in range(LAYERS):
            session.write_layer(layer)
        receiver = await decode.endpoint.decode_session(ticket, prefill.engine.address, theirs)
    with pytest.raises(ProtocolError, match=named):
        await session.wait()
    with pytest.raises(TransferCancelled, match=named):
        await receiver.wait()
    nothing = [bytes(GROUPED.part_bytes)] * 2
    assert all(of_layer(decode, layer, 7) == nothing for layer in range(LAYERS))


async def test_a_grant_opens_the_blocks_of_its_group_alone(fabric: str) -> None:
    async with worker("decode", fabric, layout=GROUPED) as decode:
        table = blocks([[5, 3], [ABSENT, 9]]).ids
        ranges = grant_ranges(decode.cache, plan_transfer(GROUPED, GROUPED), table)
        size = GROUPED.part_bytes
        plane = NUM_BLOCKS * size
        begins = [offset - index * plane for index, (_, offset, _) in enumerate(ranges)]
        assert begins == ([3 * size] * 2 + [9 * size] * 2) * 3
        assert [nbytes for _, _, nbytes in ranges] == ([3 * size] * 2 + [size] * 2) * 3


async def test_blocks_for_another_number_of_groups_are_refused(
    grouped: tuple[Worker, Worker],
) -> None:
    prefill, decode = grouped
    ticket = make_ticket(prefill, decode)
    one = EngineBlocks([1, 2])
    with pytest.raises(InvalidArgument, match="for 1 KV cache groups of a cache with 2"):
        await decode.endpoint.decode_session(ticket, prefill.engine.address, one)
    with pytest.raises(InvalidArgument, match="for 1 KV cache groups of a cache with 2"):
        await prefill.endpoint.prefill_session(ticket, one)


@pytest.mark.parametrize(
    ("field", "value"), [("layer_groups", (0,) * LAYERS), ("layer_groups", ()), ("block_size", 8)]
)
def test_groups_and_their_block_size_are_equal_on_both_sides(field: str, value: object) -> None:
    with pytest.raises(LayoutMismatch, match=field):
        plan_transfer(GROUPED, dataclasses.replace(GROUPED, **{field: value}))


async def test_heads_are_put_in_order_on_the_way(fabric: str, rng: random.Random) -> None:
    """Reordering heads afterwards would change all layers of a block, and some belong to other
    groups."""
    other: KvLayout = dataclasses.replace(GROUPED, order="HND")
    async with (
        worker("prefill", fabric, layout=GROUPED) as prefill,
        worker("decode", fabric, layout=other) as decode,
    ):
        prefill.fill(range(NUM_BLOCKS), rng)
        ticket = make_ticket(prefill, decode)
        async with prefill.endpoint.prefill_session(ticket, blocks([[3], [5]])) as session:
            for layer in range(LAYERS):
                session.write_layer(layer)
            receiver = await decode.endpoint.decode_session(
                ticket, prefill.engine.address, blocks([[6], [8]])
            )
            await session.finish()
            await receiver.wait()
            receiver.take()
        for group, (ours, theirs) in enumerate(((3, 6), (5, 8))):
            sent = heads_by_token(prefill.cache, [ours])[group::2]
            assert (sent == heads_by_token(decode.cache, [theirs])[group::2]).all()


@pytest.mark.parametrize("groups", [(0, 1), (0, 2) * 3, (-1, 0) * 3, (0, "1") * 3])
def test_invalid_layer_groups_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match=r"KvLayout\.layer_groups is"):
        dataclasses.replace(LAYOUT, layer_groups=groups)
