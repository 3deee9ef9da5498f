"""Workers whose cache memory is taken away and restored."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvxfer.engine import Engine
from kvxfer.errors import (
    InvalidArgument,
    KvxferError,
    TransferCancelled,
    TransferRefused,
    UnknownRegion,
)
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from verify.polling import PATIENCE

from .workers import KEY, LAYOUT, NUM_BLOCKS, Worker, make_ticket, worker

pytestmark = pytest.mark.native

WHY = "its memory has another owner now"


@pytest.fixture(autouse=True)
def causes_are_waited_for() -> None:
    """Overrides the fixture of conftest.py, as the errors here are causes themselves."""


class Sleeper(Worker):
    """A worker whose cache is in memory of the caller: `memory[plane, block]`."""

    memory: np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


@asynccontextmanager
async def sleeper(name: str, fabric: str) -> AsyncIterator[Sleeper]:
    memory = np.zeros((2 * LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.part_bytes), np.uint8)
    arrays = [[memory[2 * layer], memory[2 * layer + 1]] for layer in range(LAYOUT.num_layers)]
    async with Engine(
        cluster_key=KEY, name=name, fabrics=(fabric,), peer_timeout=PATIENCE
    ) as engine:
        with KvCache.register(engine, LAYOUT, NUM_BLOCKS, arrays) as cache:
            pool = BlockPool(NUM_BLOCKS)
            identity, options = KvIdentity(name, KEY, 1), KvOptions(connect_timeout=PATIENCE)
            async with KvEndpoint(engine, cache, pool, identity, options) as endpoint:
                made = Sleeper(engine, cache, pool, endpoint)
                made.memory = memory
                yield made
            assert pool.num_free == NUM_BLOCKS


@pytest.fixture
async def pair(fabric: str) -> AsyncIterator[tuple[Sleeper, Sleeper]]:
    async with sleeper("prefill", fabric) as prefill, sleeper("decode", fabric) as decode:
        yield prefill, decode


async def move(prefill: Sleeper, decode: Sleeper, rng: random.Random) -> None:
    """Moves a prompt of three blocks."""
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(3) as ours:
        sent = np.frombuffer(rng.randbytes(prefill.memory[:, ours.ids].size), np.uint8)
        prefill.memory[:, ours.ids] = sent.reshape(prefill.memory[:, ours.ids].shape)
        async with (
            prefill.endpoint.prefill_session(ticket, ours) as sending,
            decode.endpoint.decode_session(ticket, prefill.engine.address, 3) as receiving,
        ):
            for layer in range(LAYOUT.num_layers):
                sending.write_layer(layer)
            await sending.finish()
            await receiving.wait()
            with receiving.take() as theirs:
                assert decode.memory[:, theirs.ids].tobytes() == sent.tobytes()


@pytest.mark.parametrize("sleeps", ["prefill", "decode"])
async def test_nothing_is_read_or_written_until_the_memory_is_back(
    pair: tuple[Sleeper, Sleeper], rng: random.Random, sleeps: str
) -> None:
    prefill, decode = pair
    one = {"prefill": prefill, "decode": decode}[sleeps]
    for _ in range(3):
        await move(prefill, decode, rng)
        ticket = make_ticket(prefill, decode)
        with prefill.pool.hold(3) as ours:
            sending = await prefill.endpoint.prefill_session(ticket, ours)
            receiving = await decode.endpoint.decode_session(ticket, prefill.engine.address, 3)
            sending.write_layer(0)
            await one.endpoint.suspend(WHY)
            for session in (sending, receiving):
                with pytest.raises(TransferCancelled, match=WHY):
                    await session.wait()
        before = one.memory.copy()
        for planes in one.cache.planes:
            with pytest.raises(UnknownRegion):
                planes[0].region.write(b"x")
        await refused(prefill, decode, sleeps)
        assert np.array_equal(one.memory, before)
        await one.endpoint.suspend(WHY)  # a second call changes nothing
        await one.endpoint.resume()


async def refused(prefill: Sleeper, decode: Sleeper, sleeps: str) -> None:
    """Checks that either side gets the reason, at once."""
    ticket = make_ticket(prefill, decode)
    why = f"instance '{sleeps}' has no memory: {WHY}"
    with prefill.pool.hold(1) as ours:
        if sleeps == "prefill":
            with pytest.raises(TransferRefused, match=why):
                await prefill.endpoint.prefill_session(ticket, ours)
        with pytest.raises(KvxferError, match=why) as told:
            receiving = await decode.endpoint.decode_session(ticket, prefill.engine.address, 1)
            await receiving.wait()
        assert isinstance(told.value, TransferRefused)


async def test_memory_that_the_cache_allocated_cannot_be_taken_away(fabric: str) -> None:
    async with worker("prefill", fabric) as prefill:
        with pytest.raises(InvalidArgument, match="allocate"):
            prefill.cache.suspend()
