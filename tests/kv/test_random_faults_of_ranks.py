"""Random faults of one rank of several, over real engines."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from kvxfer.errors import (
    LeaseExpired,
    TransferCancelled,
)
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.layout import KvLayout

from .ranks import LAYOUT, TOKENS, Ranks, fleet, part_of, put, sized
from .workers import (
    Worker,
    heads_by_token,
)

pytestmark = pytest.mark.native


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (sized(LAYOUT, 2, 2), sized(LAYOUT, 1, 1)),
        (sized(LAYOUT, 1, 1), sized(LAYOUT, 2, 2)),
        (sized(LAYOUT, 2, 1), sized(LAYOUT, 1, 2, order="HND", block_size=6)),
    ],
    ids=["4 to 1", "1 to 4", "2 to 2"],
)
async def test_no_fault_of_a_rank_leaks_a_block_or_gives_a_wrong_byte(
    fabric: str, rng: random.Random, prefill: KvLayout, decode: KvLayout
) -> None:
    """Runs many transfers at once, most with a rank that is cancelled at a random moment."""
    nbytes = LAYOUT.num_layers * 2 * TOKENS * LAYOUT.num_kv_heads * LAYOUT.vector_bytes
    shape = (LAYOUT.num_layers, 2, TOKENS, LAYOUT.num_kv_heads, LAYOUT.vector_bytes)
    room = asyncio.Semaphore(5)
    ends: list[str] = []

    async def one(ranks: Ranks, seed: int) -> None:
        choices = random.Random(seed)
        fault = choices.random() < 0.7
        # If a side is cancelled before it sends anything, only their leases end the others.
        lease_seconds = 2.0 if fault else None
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
                async with rank.endpoint.prefill_session(
                    ticket, hold, lease_seconds=lease_seconds
                ) as session:
                    sessions.append(session)
                    for layer in range(layout.layers_per_rank):
                        session.write_layer(layer)
                        await pause()
                    await session.finish(b"tail")

        async def receive(rank: Worker) -> None:
            await pause()
            layout = rank.cache.layout
            async with rank.endpoint.decode_session(
                ticket, ranks.addresses, layout.blocks_for(TOKENS), lease_seconds=lease_seconds
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
            if fault:
                for _ in range(choices.randrange(60)):
                    await asyncio.sleep(0)
                if sessions and choices.random() < 0.5:
                    await choices.choice(sessions).cancel("fault")
                else:
                    tasks[0].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
        failures = [failure for failure in found if failure is not None]
        allowed = (TransferCancelled, LeaseExpired, asyncio.CancelledError)
        assert all(isinstance(failure, allowed) for failure in failures), failures
        assert fault or not failures
        ends.append("failed" if failures else "done")

    async with fleet(fabric, prefill, decode) as ranks:
        await asyncio.gather(*(one(ranks, rng.getrandbits(32)) for _ in range(40)))
    assert ends.count("done") >= 5
    assert ends.count("failed") >= 5
