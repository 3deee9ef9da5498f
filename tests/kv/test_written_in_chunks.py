"""Prefill sessions whose blocks are computed, and known, chunk by chunk."""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from kvxfer.errors import InvalidArgument, LayoutMismatch
from kvxfer.kv.plan import plan_transfer
from kvxfer.layout import KvLayout
from verify.polling import eventually

from .workers import LAYERS, LAYOUT, Worker, make_ticket, receive, worker

pytestmark = pytest.mark.native


@pytest.mark.parametrize("offered", ["before", "between", "after"])
async def test_chunks_arrive_whenever_the_offer_comes(
    pair: tuple[Worker, Worker], rng: random.Random, offered: str
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(7) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            receiving = None
            for until in (2, 3, 7):
                if receiving is None and offered != "after" and (offered, until) != ("between", 2):
                    receiving = asyncio.create_task(receive(prefill, decode, ticket, 7))
                    await eventually(lambda: session.fabric is not None)
                for layer in range(LAYERS):
                    session.write_layer(layer, until)
            if receiving is None:
                receiving = asyncio.create_task(receive(prefill, decode, ticket, 7))
            await session.finish(b"tail")
            received = await receiving
            assert session.nbytes == 7 * LAYERS * LAYOUT.block_bytes
        assert received == prefill.contents(hold.ids.tolist())


async def test_blocks_that_decode_has_are_left_out_of_every_chunk(
    pair: tuple[Worker, Worker], rng: random.Random
) -> None:
    prefill, decode = pair
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(6) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            receiver = await decode.endpoint.decode_session(
                ticket, prefill.engine.address, 3, first_block=3
            )
            for until in (2, 4, 6):
                for layer in range(LAYERS):
                    session.write_layer(layer, until)
            await session.finish()
            await receiver.wait()
            assert session.nbytes == 3 * LAYERS * LAYOUT.block_bytes
        with receiver.take() as received:
            assert decode.contents(received.ids.tolist()) == prefill.contents(hold.ids.tolist()[3:])


async def test_a_chunk_that_was_written_before_or_exceeds_the_prompt_is_refused(
    pair: tuple[Worker, Worker],
) -> None:
    prefill, decode = pair
    with prefill.pool.hold(4) as hold:
        ticket = make_ticket(prefill, decode)
        async with prefill.endpoint.prefill_session(ticket, hold) as session:
            session.write_layer(0, 2)
            with pytest.raises(InvalidArgument, match="layer 0 was written before"):
                session.write_layer(0, 2)
            with pytest.raises(InvalidArgument, match="until block 5; the prompt has 4"):
                session.write_layer(0, 5)
            with pytest.raises(InvalidArgument, match=r"finish\(\) before layer 0, 1"):
                await session.finish()


OPAQUE = KvLayout(
    num_layers=2,
    num_kv_heads=4,
    head_size=8,
    dtype="bfloat16",
    block_size=16,
    order="HND",
    kv="opaque",
)


def test_an_opaque_block_goes_in_one_run() -> None:
    plan = plan_transfer(OPAQUE, OPAQUE)
    [copy] = plan.layers[0].copies
    assert (copy.length, copy.count) == (OPAQUE.block_bytes, 1) == (4 * 16 * 2 * 8 * 2, 1)


def test_opaque_heads_go_to_the_ranks_that_have_them() -> None:
    half = dataclasses.replace(OPAQUE, tp_size=2, tp_rank=1)
    [copy] = plan_transfer(OPAQUE, half).layers[0].copies
    assert (copy.src_offset, copy.dst_offset) == (OPAQUE.block_bytes // 2, 0)
    assert (copy.length, copy.count) == (half.block_bytes, 1)


@pytest.mark.parametrize(
    ("field", "value"), [("block_size", 32), ("kv", "interleaved"), ("kv", "separate")]
)
def test_blocks_that_are_opaque_on_one_side_are_not_taken_apart(field: str, value: object) -> None:
    with pytest.raises(LayoutMismatch, match=field):
        plan_transfer(OPAQUE, dataclasses.replace(OPAQUE, **{field: value}))


@pytest.mark.parametrize("packing", ["vec", "amx"])
def test_an_order_that_is_known_is_taken_apart(packing: str) -> None:
    small = dataclasses.replace(OPAQUE, head_size=32, packing=packing)
    large = dataclasses.replace(small, block_size=64)
    plan = plan_transfer(small, large)
    assert plan.cycle_tokens == 4 * small.block_size == large.block_size
    assert plan.bytes_per_cycle == 2 * large.block_bytes
    lengths = {copy.length for copy in plan.layers[0].copies}
    # vec: a dimension of K, all of V; amx: all of K, 16 dimensions of V
    assert lengths == {16 * 2, 16 * 32 * 2} if packing == "vec" else {16 * 32 * 2, 16 * 16 * 2}


def test_orders_of_two_kinds_are_refused_by_name() -> None:
    vec, amx = (dataclasses.replace(OPAQUE, head_size=32, packing=name) for name in ("vec", "amx"))
    with pytest.raises(LayoutMismatch, match="packing is 'vec' at prefill and 'amx' at decode"):
        plan_transfer(vec, amx)
    unknown = dataclasses.replace(OPAQUE, packing="neon")
    with pytest.raises(LayoutMismatch, match="block_size"):
        plan_transfer(unknown, dataclasses.replace(unknown, block_size=32))
    [copy] = plan_transfer(unknown, unknown).layers[0].copies
    assert copy.length == unknown.block_bytes


def test_opaque_heads_are_outermost() -> None:
    with pytest.raises(InvalidArgument, match="pass 'HND'"):
        dataclasses.replace(OPAQUE, order="NHD")


@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("offered_first", [False, True])
async def test_layers_that_are_written_beforehand_leave_when_they_are_computed(
    fabric: str, rng: random.Random, checksums: bool, offered_first: bool
) -> None:
    async with (
        worker("p", fabric, checksums=checksums) as prefill,
        worker("d", fabric) as decode,
    ):
        ticket = make_ticket(prefill, decode)
        with prefill.pool.hold(7) as hold:
            watcher = prefill.engine.watcher()
            async with prefill.endpoint.prefill_session(ticket, hold) as session:
                receiving = None
                if offered_first:
                    receiving = asyncio.create_task(receive(prefill, decode, ticket, 7))
                    await eventually(lambda: session.fabric is not None)
                for step, until in enumerate((2, 3, 7)):
                    for layer in range(LAYERS):
                        session.write_layer(
                            layer, until, after=watcher.at(LAYERS * step + layer + 1)
                        )
                    # These blocks are computed only now; those sent before stay as they were.
                    prefill.fill(hold.ids[(0, 2, 3)[step] : until].tolist(), rng)
                    for _ in range(LAYERS):
                        watcher.add()
                if receiving is None:
                    receiving = asyncio.create_task(receive(prefill, decode, ticket, 7))
                await session.finish(b"tail")
                received = await receiving
            assert received == prefill.contents(hold.ids.tolist())
            assert bool(decode.endpoint.counts.checked_bytes) is checksums
