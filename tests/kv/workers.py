"""Workers for the tests: an engine, a cache, a pool and an endpoint, all in this process."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine import Engine
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache, Permute, permute_on_host
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.kv.session_state import DecodeState
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import PATIENCE, eventually

KEY = b"0123456789abcdef0123456789abcdef"
NUM_BLOCKS = 24
LAYOUT = KvLayout(num_layers=6, num_kv_heads=2, head_size=32, dtype="float32", block_size=4)
LAYERS = LAYOUT.num_layers
GROUPED = replace(LAYOUT, layer_groups=(0, 1) * 3)


@dataclass
class Worker:
    engine: Engine
    cache: KvCache
    pool: BlockPool
    endpoint: KvEndpoint

    def fill(self, ids: Sequence[int], rng: random.Random) -> None:
        """Writes random bytes into blocks."""
        for plane, size in self._planes():
            for block in ids:
                plane[block * size : (block + 1) * size] = rng.randbytes(size)

    def contents(self, ids: Sequence[int]) -> list[bytes]:
        """Returns the bytes of blocks, plane by plane."""
        return [
            bytes(plane[block * size : (block + 1) * size])
            for plane, size in self._planes()
            for block in ids
        ]

    def _planes(self) -> Iterator[tuple[memoryview, int]]:
        """Yields each plane, and the bytes of a block in it."""
        for layer in range(self.cache.layout.layers_per_rank):
            of_layer = self.cache.layout.of_layer(layer)
            for part in of_layer.parts:
                yield self.cache.buffer(layer, part), of_layer.part_bytes

    def scatter(self, rng: random.Random, count: int) -> contextlib.ExitStack:
        """Leaves `count` random blocks free, the others held until the returned stack is closed."""
        stack = contextlib.ExitStack()
        holds = [self.pool.hold(1) for _ in range(self.pool.num_free)]
        rng.shuffle(holds)
        for hold in holds[:count]:
            hold.release()
        for hold in holds[count:]:
            stack.enter_context(hold)
        return stack


@contextlib.asynccontextmanager
async def worker(
    name: str,
    fabric: str,
    *,
    layout: KvLayout = LAYOUT,
    num_blocks: int = NUM_BLOCKS,
    epoch: int = 1,
    lease_seconds: float = 10 * PATIENCE,
    max_early_offers_per_peer: int = 64,
    ticket_key: bytes = KEY,
    control_plane: ControlPlaneClient | None = None,
    instance_id: str | None = None,
    permute: Permute | None = permute_on_host,
    checksums: bool = False,
    model: ModelIdentity | None = None,
) -> AsyncIterator[Worker]:
    """A worker whose blocks are all free again when it ends in good order.

    Its time limits are so long that none ends a transfer on a busy machine before the other side's
    message arrives.
    """
    async with Engine(
        cluster_key=KEY, name=name, fabrics=(fabric,), peer_timeout=PATIENCE
    ) as engine:
        with KvCache.allocate(engine, layout, num_blocks, permute=permute) as cache:
            pool = BlockPool(num_blocks)
            async with KvEndpoint(
                engine,
                cache,
                pool,
                KvIdentity(instance_id or name, ticket_key, epoch, model),
                KvOptions(
                    control_plane=control_plane,
                    connect_timeout=PATIENCE,
                    lease_seconds=lease_seconds,
                    max_early_offers_per_peer=max_early_offers_per_peer,
                    checksums=checksums,
                ),
            ) as endpoint:
                yield Worker(engine, cache, pool, endpoint)
                pool.check()
                assert pool.num_free == num_blocks, pool.counts()


def make_ticket(
    prefill: Worker,
    decode: Worker,
    *,
    transfer_id: str | None = None,
    decode_id: str | None = None,
    seconds: float = 20 * PATIENCE,
    issued_at: float | None = None,
    adapter: str = "",
) -> str:
    return sign_ticket(
        Ticket(
            transfer_id=transfer_id or uuid.uuid4().hex,
            request_id="request",
            prefill_id=prefill.endpoint.instance_id,
            prefill_epoch=prefill.endpoint.epoch,
            decode_id=decode_id or decode.endpoint.instance_id,
            decode_epoch=decode.endpoint.epoch,
            expires_at=SYSTEM_CLOCK.unix() + seconds,
            issued_at=SYSTEM_CLOCK.unix() if issued_at is None else issued_at,
            adapter=adapter,
        ),
        KEY,
    )


def heads_by_token(cache: KvCache, blocks: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns the contents of blocks in any layout: bytes by layer, K and V, token, head."""
    layout = cache.layout
    tokens, heads = layout.block_size, layout.heads_per_rank
    inner = (heads, tokens) if layout.order == "HND" else (tokens, heads)
    vectors = 1 if layout.mla or layout.joined else 2
    made = np.empty(
        (layout.layers_per_rank, vectors, len(blocks), tokens, heads, layout.vector_bytes), np.uint8
    )
    for layer in range(layout.layers_per_rank):
        planes = [np.frombuffer(cache.buffer(layer, part), np.uint8) for part in layout.parts]
        for vector in range(vectors):
            plane = planes[vector if len(planes) == 2 else 0].reshape(cache.num_blocks, -1)
            of_block = plane.shape[1] // (vectors // len(planes))
            begin = 0 if len(planes) == 2 else vector * of_block
            found = plane[list(blocks), begin : begin + of_block].reshape(len(blocks), *inner, -1)
            made[layer, vector] = found.swapaxes(1, 2) if layout.order == "HND" else found
    return made.reshape(layout.layers_per_rank, vectors, -1, heads, layout.vector_bytes)


async def dial_each_other(prefill: Worker, decode: Worker) -> None:
    """Makes two connections between two engines: each dials before it knows of the other's dial. If
    one dial comes too late for that, there is one connection, and both dial again."""

    def pairs() -> list[int]:
        return [len(list(one.endpoint._connections)) for one in (prefill, decode)]

    async def have_met_twice() -> bool:
        await asyncio.gather(
            prefill.engine.connect(decode.engine.address),
            decode.engine.connect(prefill.engine.address),
        )
        with contextlib.suppress(TimeoutError):
            await eventually(lambda: pairs() == [2, 2], 2)
            return True
        for peer in decode.engine.peers:
            peer.fence()
        await eventually(lambda: pairs() == [0, 0])
        return False

    await eventually(have_met_twice, 2 * PATIENCE)


def early_offers(prefill: Worker) -> int:
    """Returns the number of offers that wait at a prefill worker for their requests."""
    return len(prefill.endpoint._prefill_side._early)


async def send(
    prefill: Worker,
    ticket: str,
    num_blocks: int,
    rng: random.Random,
    tail: bytes = b"tail",
    lease_seconds: float | None = None,
) -> list[bytes]:
    """Sends a whole prompt from prefill; returns what the blocks held."""
    with prefill.pool.hold(num_blocks) as hold:
        prefill.fill(hold.ids.tolist(), rng)
        sent = prefill.contents(hold.ids.tolist())
        async with prefill.endpoint.prefill_session(
            ticket, hold, lease_seconds=lease_seconds
        ) as session:
            layers = prefill.cache.layout.layers_per_rank
            for layer in rng.sample(range(layers), layers):
                session.write_layer(layer)
                await asyncio.sleep(0)
            await session.finish(tail)
    return sent


async def receive(
    prefill: Worker,
    decode: Worker,
    ticket: str,
    num_blocks: int,
    tail: bytes = b"tail",
    lease_seconds: float | None = None,
) -> list[bytes]:
    """Receives a whole prompt at decode; returns what the blocks hold."""
    async with decode.endpoint.decode_session(
        ticket, prefill.engine.address, num_blocks, lease_seconds=lease_seconds
    ) as session:
        assert await session.wait() == tail
        with session.take() as hold:
            return decode.contents(hold.ids.tolist())


async def accepted(receiver: DecodeSession) -> None:
    """Waits until prefill has accepted the offer."""
    await eventually(lambda: receiver.state is DecodeState.RECEIVING)
