"""KV caches from a prefill process to a decode process, for an inference engine that you wrote,
without a control plane. Every byte is compared. At the end prefill is killed during a transfer.
kv_fleet.py does the same in a fleet, with decode on two ranks.

    python examples/python/kv_transfer.py
"""

from __future__ import annotations

import asyncio
import multiprocessing
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection

import numpy as np

from kvxfer import Engine
from kvxfer.errors import PeerError
from kvxfer.kv import BlockPool, KvCache, KvEndpoint, KvIdentity, KvLayout, Ticket, sign_ticket

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_size=64, dtype="float16", block_size=16)
BLOCKS = 64
PROMPTS = (1, 16, 100, 333)  # tokens
EPOCH = 1  # a new one after a restart, so that tickets for the earlier process are refused


def computed(blocks: int, layer: int, part: str) -> np.ndarray:
    """Returns K or V of a prompt in a layer, [blocks, block_size, heads, head_size]: a model's
    work."""
    draw = np.random.default_rng([blocks, layer, ord(part)])
    return draw.integers(0, 1000, (blocks, 16, 2, 64)).astype(np.float16)


@dataclass
class Worker:
    engine: Engine
    cache: KvCache
    pool: BlockPool
    endpoint: KvEndpoint

    def plane(self, layer: int, part: str) -> np.ndarray:
        """Returns K or V of all blocks, in the memory that is transferred."""
        values = np.frombuffer(self.cache.buffer(layer, part), np.float16)
        return values.reshape(BLOCKS, 16, self.cache.layout.heads_per_rank, 64)

    async def prefill(self, ticket: str, tokens: int, halfway: Connection | None = None) -> None:
        with self.pool.hold(LAYOUT.blocks_for(tokens)) as hold:
            async with self.endpoint.prefill_session(ticket, hold) as session:
                for layer in range(LAYOUT.num_layers):
                    for part in LAYOUT.parts:
                        self.plane(layer, part)[hold.ids] = computed(len(hold), layer, part)
                    session.write_layer(layer)  # leaves while the next layer is computed
                    if halfway is not None and layer == 1:
                        halfway.send("two layers are written")
                        await session.wait()  # the process is killed here
                await session.finish(tail=b"first token")

    async def decode(self, ticket: str, prefill_address: str, tokens: int) -> int:
        layout, blocks = self.cache.layout, LAYOUT.blocks_for(tokens)
        heads = slice(layout.first_head, layout.first_head + layout.heads_per_rank)
        async with self.endpoint.decode_session(ticket, prefill_address, blocks) as session:
            assert await session.wait() == b"first token"
            with session.take() as hold:  # an engine decodes here
                for layer, part in product(range(LAYOUT.num_layers), LAYOUT.parts):
                    expected = computed(blocks, layer, part)[:, :, heads]
                    assert (self.plane(layer, part)[hold.ids] == expected).all()
        return session.nbytes


@asynccontextmanager
async def worker(
    instance_id: str, key: str, layout: KvLayout = LAYOUT, epoch: int = EPOCH
) -> AsyncIterator[Worker]:
    async with Engine(cluster_key=key) as engine:
        with KvCache.allocate(engine, layout, BLOCKS) as cache:
            pool = BlockPool(BLOCKS)
            identity = KvIdentity(instance_id, key, epoch)
            async with KvEndpoint(engine, cache, pool, identity) as endpoint:
                yield Worker(engine, cache, pool, endpoint)
                pool.check()
                assert pool.num_free == BLOCKS  # however its transfers ended


def prefill_process(pipe: Connection, key: str) -> None:
    async def serve() -> None:
        async with worker("prefill", key) as prefill:
            pipe.send(prefill.engine.address)
            while True:
                ticket, tokens, halfway = await asyncio.to_thread(pipe.recv)
                await prefill.prefill(ticket, tokens, pipe if halfway else None)

    asyncio.run(serve())


def new_ticket(key: str) -> str:
    """Signs the ticket of a transfer, as the program does that sends a request to both workers."""
    ticket = Ticket(
        transfer_id=secrets.token_hex(8),
        request_id="a request",
        prefill_id="prefill",
        prefill_epoch=EPOCH,
        decode_id="decode",
        decode_epoch=EPOCH,
        expires_at=time.time() + 60,
    )
    return sign_ticket(ticket, key)


async def main() -> None:
    key = secrets.token_hex()
    pipe, theirs = multiprocessing.Pipe()
    prefill = multiprocessing.Process(target=prefill_process, args=(theirs, key))
    prefill.start()
    address = await asyncio.to_thread(pipe.recv)
    async with worker("decode", key) as decode:
        for tokens in PROMPTS:
            ticket = new_ticket(key)
            pipe.send((ticket, tokens, False))
            nbytes = await decode.decode(ticket, address, tokens)
            print(f"{tokens:3d} tokens: {nbytes} bytes, all as computed")

        ticket = new_ticket(key)
        pipe.send((ticket, tokens, True))
        decoding = asyncio.create_task(decode.decode(ticket, address, tokens))
        await asyncio.to_thread(pipe.recv)
        prefill.kill()
        try:
            await decoding
        except PeerError as error:
            print(f"prefill is killed: {error.code}, {decode.pool.num_free} blocks are free")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")  # an engine does not survive a fork
    asyncio.run(main())
