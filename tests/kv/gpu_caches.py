"""Transfers between KV caches, some in GPU memory: `python -m tests.kv.gpu_caches FABRIC`."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import random
import sys
from collections.abc import AsyncIterator, Sequence

from kvxfer.engine import Engine
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache, KvPlane
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity
from tests.cuda import device_memory
from tests.cuda.bindings import context
from verify.polling import PATIENCE

from .workers import KEY, LAYOUT, NUM_BLOCKS, Worker, make_ticket

BLOCKS = 5


class GpuWorker(Worker):
    """A worker whose blocks may be in GPU memory."""

    def fill(self, ids: Sequence[int], rng: random.Random) -> None:
        for address in self._addresses(ids):
            data = rng.randbytes(LAYOUT.part_bytes)
            if self.cache.gpu is None:
                ctypes.memmove(address, data, len(data))
            else:
                device_memory.write(address, data)

    def contents(self, ids: Sequence[int]) -> list[bytes]:
        read = ctypes.string_at if self.cache.gpu is None else device_memory.read
        return [read(address, LAYOUT.part_bytes) for address in self._addresses(ids)]

    def _addresses(self, ids: Sequence[int]) -> list[int]:
        planes = [plane for layer in self.cache.planes for plane in layer]
        return [
            plane.region.address + plane.offset + block * plane.block_stride
            for plane in planes
            for block in ids
        ]


@contextlib.asynccontextmanager
async def worker(name: str, fabric: str, gpu: int | None) -> AsyncIterator[GpuWorker]:
    options = {"fabrics": (fabric,), "peer_timeout": PATIENCE}
    async with Engine(cluster_key=KEY, name=name, **options) as engine:
        size = NUM_BLOCKS * LAYOUT.part_bytes
        memory = engine.alloc(2 * LAYOUT.num_layers * size, gpu=gpu)
        planes = [
            [
                KvPlane(memory.region, (2 * layer + part) * size, LAYOUT.part_bytes)
                for part in (0, 1)
            ]
            for layer in range(LAYOUT.num_layers)
        ]
        cache, pool = KvCache(LAYOUT, NUM_BLOCKS, planes), BlockPool(NUM_BLOCKS)
        assert cache.gpu == gpu
        identity = KvIdentity(name, KEY, 1)
        async with KvEndpoint(engine, cache, pool, identity) as endpoint:
            yield GpuWorker(engine, cache, pool, endpoint)
        memory.close()


async def transfer(prefill: GpuWorker, decode: GpuWorker, rng: random.Random) -> None:
    ticket = make_ticket(prefill, decode)
    with prefill.pool.hold(BLOCKS) as source:
        prefill.fill(source.ids.tolist(), rng)
        async with (
            prefill.endpoint.prefill_session(ticket, source) as sending,
            decode.endpoint.decode_session(ticket, prefill.engine.address, BLOCKS) as receiving,
        ):
            for layer in range(LAYOUT.num_layers):
                sending.write_layer(layer)
            await sending.finish(b"tail")
            assert await receiving.wait() == b"tail"
            with receiving.take() as target:
                sent = prefill.contents(source.ids.tolist())
                assert decode.contents(target.ids.tolist()) == sent


async def main(fabric: str) -> None:
    for here, there in ((0, 0), (0, None), (None, 0)):
        async with worker("p", fabric, here) as prefill, worker("d", fabric, there) as decode:
            await transfer(prefill, decode, random.Random(1))


if __name__ == "__main__":
    context()
    asyncio.run(main(sys.argv[1]))
