"""A worker process for fault tests.

Run as `python -m verify.chaos.engine.worker INSTANCE EPOCH FABRIC HOST`
(verify/processes/worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Final

import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.kv.block_pool import BlockHold, BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.layout import KvLayout
from verify.polling import eventually
from verify.processes.commands import commands, kv_endpoint, report

from .pattern import Page, page, reused, wrong_bytes

KEY: Final = b"the cluster key of the fault tests"
NUM_BLOCKS: Final = 128
_BACK_SECONDS: Final = 5.0
LAYOUT: Final = KvLayout(num_layers=8, num_kv_heads=8, head_size=32, dtype="float32", block_size=16)


class FaultWorker:
    """A worker that executes the driver's commands. Reports have times of CLOCK_MONOTONIC."""

    def __init__(self, cache: KvCache, pool: BlockPool, endpoint: KvEndpoint) -> None:
        self._pool = pool
        self._endpoint = endpoint
        self._planes = [
            np.frombuffer(cache.buffer(layer, part), np.uint64).reshape(NUM_BLOCKS, -1)
            for layer in range(LAYOUT.layers_per_rank)
            for part in LAYOUT.parts
        ]
        self._other_request: BlockHold | None = None
        self._session: PrefillSession | DecodeSession | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hogged: list[bytearray] = []

    def command(self, command: dict[str, Any]) -> None:
        match command.pop("do"):
            case "prefill":
                self._start(self._run("prefill", self._prefill(**command)))
            case "decode":
                self._start(self._run("decode", self._decode(**command)))
            case "cancel":
                self._cancel()
            case "reuse":
                self._reuse()
            case "check":
                self._check()
            case "hog":
                self._hog()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, role: str, transfer: Awaitable[int]) -> None:
        wrong, error, text = 0, None, ""
        try:
            wrong = await transfer
        except KvxferError as failure:
            error, text = failure.code, str(failure)
        except (MemoryError, SystemError) as failure:
            # numpy raises SystemError if memory is missing. Any other SystemError is a defect.
            if isinstance(failure, SystemError) and not self._hogged:
                raise
            error = "no-memory"
        at = time.monotonic()
        if self._hogged:
            # Without memory, blocks may be given back late, but they are given back.
            self._hogged.clear()
            with contextlib.suppress(TimeoutError):
                await eventually(lambda: self._pool.num_free == NUM_BLOCKS, _BACK_SECONDS)
        report(
            "ended",
            role=role,
            error=error,
            text=text,
            at=at,
            free=self._pool.num_free,
            wrong=wrong,
        )

    async def _prefill(
        self, ticket: str, seed: int, blocks: int, pause: float, hold_back: bool
    ) -> int:
        with self._pool.hold(blocks) as hold:
            ids = hold.ids.tolist()
            for plane, index in self._pages(blocks):
                self._planes[plane][ids[index]] = self._page(seed, plane, index)
            async with self._endpoint.prefill_session(ticket, hold) as session:
                self._session = session
                report("ready-to-send")
                last = LAYOUT.layers_per_rank - 1 if hold_back else LAYOUT.layers_per_rank
                for layer in range(last):
                    session.write_layer(layer)
                    await asyncio.sleep(pause)
                if hold_back:
                    # The driver causes a fault now; only a failure ends this wait.
                    await session.wait()
                await session.finish(b"tail")
        return 0

    async def _decode(self, ticket: str, address: str, seed: int, blocks: int) -> int:
        async with self._endpoint.decode_session(ticket, address, blocks) as session:
            self._session = session
            report("offered")
            await session.wait()
            with session.take() as hold:
                ids = hold.ids.tolist()
                return sum(
                    wrong_bytes(self._planes[plane][ids[index]], self._page(seed, plane, index))
                    for plane, index in self._pages(blocks)
                )

    def _cancel(self) -> None:
        assert self._session is not None
        self._session.cancel("the driver says so")

    def _reuse(self) -> None:
        """Gives every free block to another request, which writes its bytes into them."""
        self._pool.check()
        self._other_request = self._pool.hold(self._pool.num_free)
        for block in self._other_request.ids.tolist():
            for plane in self._planes:
                plane[block] = reused(block, LAYOUT.part_bytes)
        report("reused", blocks=len(self._other_request))

    def _check(self) -> None:
        """Reports the number of the other request's bytes that were changed."""
        assert self._other_request is not None
        wrong = sum(
            wrong_bytes(plane[block], reused(block, LAYOUT.part_bytes))
            for block in self._other_request.ids.tolist()
            for plane in self._planes
        )
        self._other_request.release()
        self._pool.check()
        report("checked", wrong=wrong, free=self._pool.num_free)

    def _hog(self) -> None:
        """Allocates memory until not even a page is left."""
        for size in (1 << 20, LAYOUT.part_bytes):
            with contextlib.suppress(MemoryError):
                while True:
                    self._hogged.append(bytearray(size))
        report("hogged")

    def _pages(self, blocks: int) -> list[tuple[int, int]]:
        return [(plane, index) for plane in range(len(self._planes)) for index in range(blocks)]

    def _page(self, seed: int, plane: int, index: int) -> Page:
        return page(seed, plane, index, LAYOUT.part_bytes)


async def main(instance: str, epoch: int, fabric: str, host: str) -> None:
    async with kv_endpoint(
        *(instance, LAYOUT, NUM_BLOCKS),
        key=KEY,
        epoch=epoch,
        fabrics=(fabric,),
        host=host,
        peer_timeout=float(os.environ.get("KVXFER_PEER_TIMEOUT", "0.7")),
    ) as (engine, cache, pool, endpoint):
        worker = FaultWorker(cache, pool, endpoint)
        report("ready", address=engine.address)
        with contextlib.suppress(MemoryError, SystemError):
            async for command in commands():
                worker.command(command)
        os._exit(0)  # no memory is left for a clean end


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
