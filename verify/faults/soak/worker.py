"""A worker process of the soak: JSON commands on stdin, JSON events on stdout; any number of
transfers at once.

Run as `python -m verify.faults.soak.worker INSTANCE EPOCH FABRICS HOST`. It ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Awaitable
from typing import Any, Final

import numpy as np

from kvxfer.engine import Engine
from kvxfer.errors import KvxferError
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.layout import KvLayout
from verify.faults.worker import KEY, report

NUM_BLOCKS: Final = 256
MAX_BLOCKS: Final = 48
LAYOUT: Final = KvLayout(num_layers=8, num_kv_heads=8, head_size=16, dtype="float32", block_size=16)


class SoakWorker:
    def __init__(
        self, engine: Engine, cache: KvCache, pool: BlockPool, endpoint: KvEndpoint
    ) -> None:
        self._engine, self._pool, self._endpoint = engine, pool, endpoint
        self._memory = [
            np.frombuffer(cache.buffer(layer, part), np.uint8).reshape(NUM_BLOCKS, -1)
            for layer in range(LAYOUT.layers_per_rank)
            for part in LAYOUT.parts
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._transfers: dict[int, asyncio.Task[None]] = {}
        self.closing = asyncio.Event()

    def command(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "prefill":
                self._begin(command["number"], self._prefill(**command))
            case "decode":
                self._begin(command["number"], self._decode(**command))
            case "give up":
                if (transfer := self._transfers.get(command["number"])) is not None:
                    # Not before it has begun: it would not tell.
                    asyncio.get_running_loop().call_soon(transfer.cancel)
            case "stats":
                self._pool.check()
                report("stats", free=self._pool.num_free, **self._engine.stats())
            case "close":
                self.closing.set()

    def _begin(self, number: int, transfer: Awaitable[dict[str, int]]) -> None:
        self._transfers[number] = task = self._start(self._run(number, transfer))
        task.add_done_callback(lambda _: self._transfers.pop(number))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, number: int, transfer: Awaitable[dict[str, int]]) -> None:
        found: dict[str, int] = {}
        error = None
        try:
            found = await transfer
        except KvxferError as failure:
            error = failure.code
        except asyncio.CancelledError:
            error = "given-up"
        report("ended", number=number, error=error, **found)

    async def _prefill(
        self, number: int, ticket: str, blocks: int, patience: float
    ) -> dict[str, int]:
        rng = random.Random(number)
        with self._pool.hold(blocks) as hold:
            for plane in self._memory:
                plane[hold.ids] = np.frombuffer(rng.randbytes(plane.shape[1]), np.uint8)
            async with await self._endpoint.prefill_session(ticket, hold) as session:
                if patience:
                    asyncio.get_running_loop().call_later(
                        patience, lambda: self._start(session.cancel("its client has left"))
                    )
                for layer in rng.sample(range(LAYOUT.num_layers), LAYOUT.num_layers):
                    session.write_layer(layer)
                    await asyncio.sleep(0)
                await session.finish(b"tail")
        return {"sent": session.nbytes}

    async def _decode(
        self, number: int, ticket: str, address: str, blocks: int, patience: float
    ) -> dict[str, int]:
        async with await self._endpoint.decode_session(ticket, address, blocks) as session:
            if patience:
                asyncio.get_running_loop().call_later(
                    patience, lambda: self._start(session.cancel("its client has left"))
                )
            await session.wait()
            session.take().release()
        return {"received": session.nbytes, "checked": session.checked_bytes}


def _commands() -> asyncio.StreamReader:
    """What comes on stdin. asyncio's own reader of pipes takes 256 KiB of the heap for each read,
    which fragments it, and the memory of this process is what is looked at."""
    stdin, commands = sys.stdin.fileno(), asyncio.StreamReader()

    def read() -> None:
        if data := os.read(stdin, 4096):
            commands.feed_data(data)
        else:
            asyncio.get_running_loop().remove_reader(stdin)
            commands.feed_eof()

    asyncio.get_running_loop().add_reader(stdin, read)
    return commands


async def main(instance: str, epoch: int, fabrics: str, host: str) -> None:
    commands = _commands()
    async with Engine(
        cluster_key=KEY, name=instance, fabrics=tuple(fabrics.split(",")), host=host
    ) as engine:
        cache = KvCache.allocate(engine, LAYOUT, NUM_BLOCKS)
        pool = BlockPool(NUM_BLOCKS)
        async with KvEndpoint(
            engine, cache, pool, instance_id=instance, epoch=epoch, ticket_key=KEY, checksums=True
        ) as endpoint:
            worker = SoakWorker(engine, cache, pool, endpoint)
            report("ready", address=engine.address)

            async def listen() -> None:
                while line := await commands.readline():
                    worker.command(json.loads(line))
                os._exit(0)  # the driver is gone

            listening = asyncio.create_task(listen())
            await worker.closing.wait()
            listening.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
