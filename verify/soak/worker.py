"""A worker process of the soak: any number of transfers at once.

Run as `python -m verify.soak.worker INSTANCE FABRICS` (verify/processes/worker.py).
"""

from __future__ import annotations

import asyncio
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
from kvxfer.layout import KvLayout
from verify.chaos.engine.worker import KEY
from verify.processes.commands import commands, kv_endpoint, report

NUM_BLOCKS: Final = 256
MAX_BLOCKS: Final = 48
EPOCH: Final = 1
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

    def command(self, command: dict[str, Any]) -> None:
        ident = command.pop("id", None)
        match command.pop("do"):
            case "prefill":
                self._begin(ident, command["number"], self._prefill(**command))
            case "decode":
                self._begin(ident, command["number"], self._decode(**command))
            case "give up":
                if (transfer := self._transfers.get(command["number"])) is not None:
                    # A task that is cancelled before it has begun would report nothing.
                    asyncio.get_running_loop().call_soon(transfer.cancel)
            case "stats":
                self._pool.check()
                report(id=ident, free=self._pool.num_free, **self._engine.stats())

    def _begin(self, ident: int, number: int, transfer: Awaitable[dict[str, int]]) -> None:
        self._transfers[number] = task = self._start(self._run(ident, transfer))
        task.add_done_callback(lambda _: self._transfers.pop(number))

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, ident: int, transfer: Awaitable[dict[str, int]]) -> None:
        found: dict[str, int] = {}
        error = None
        try:
            found = await transfer
        except KvxferError as failure:
            error = failure.code
        except asyncio.CancelledError:
            error = "given-up"
        report(id=ident, error=error, **found)

    async def _prefill(
        self, number: int, ticket: str, blocks: int, patience: float
    ) -> dict[str, int]:
        rng = random.Random(number)
        with self._pool.hold(blocks) as hold:
            for plane in self._memory:
                plane[hold.ids] = np.frombuffer(rng.randbytes(plane.shape[1]), np.uint8)
            async with self._endpoint.prefill_session(ticket, hold) as session:
                if patience:
                    asyncio.get_running_loop().call_later(
                        patience, session.cancel, "its client has left"
                    )
                for layer in rng.sample(range(LAYOUT.num_layers), LAYOUT.num_layers):
                    session.write_layer(layer)
                    await asyncio.sleep(0)
                await session.finish(b"tail")
        return {"sent": session.nbytes}

    async def _decode(
        self, number: int, ticket: str, address: str, blocks: int, patience: float
    ) -> dict[str, int]:
        async with self._endpoint.decode_session(ticket, address, blocks) as session:
            if patience:
                asyncio.get_running_loop().call_later(
                    patience, session.cancel, "its client has left"
                )
            await session.wait()
            session.take().release()
        return {"received": session.nbytes, "checked": session.checked_bytes}


async def main(instance: str, fabrics: str) -> None:
    how = {"key": KEY, "epoch": EPOCH, "checksums": True, "fabrics": tuple(fabrics.split(","))}
    async with kv_endpoint(instance, LAYOUT, NUM_BLOCKS, **how) as parts:
        worker = SoakWorker(*parts)
        report("ready", address=parts[0].address)
        async for command in commands():
            if command["do"] == "close":
                break
            worker.command(command)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
