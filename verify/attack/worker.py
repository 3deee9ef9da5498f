"""A worker process that is attacked.

Run as `python -m verify.attack.worker INSTANCE FABRIC [checksums]` (verify/processes/worker.py).
All memory that no honest transfer uses holds a pattern: the vault region, and every second block of
the cache.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvxfer.engine import Counter, Engine
from kvxfer.errors import KvxferError
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.layout import KvLayout
from kvxfer.worker_metrics import WorkerMetrics
from verify.processes.commands import commands, kv_endpoint, report

KEY: Final = b"the cluster key of the attacked workers"
EPOCH: Final = 1
NUM_BLOCKS: Final = 96
HONEST_BLOCKS: Final = 32  # in one honest transfer: 16 MiB
VAULT_BYTES: Final = 8 << 20
GRANT_BYTES: Final = 64 << 10
PATTERN: Final = 0xA5
LAYOUT: Final = KvLayout(num_layers=8, num_kv_heads=8, head_size=64, dtype="float32", block_size=16)


class Worker:
    def __init__(
        self, engine: Engine, cache: KvCache, pool: BlockPool, endpoint: KvEndpoint
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._endpoint = endpoint
        self._metrics = WorkerMetrics(engine, endpoint)
        self._vault = engine.alloc(VAULT_BYTES)
        self._planes = [
            np.frombuffer(cache.buffer(layer, part), np.uint8).reshape(NUM_BLOCKS, -1)
            for layer in range(LAYOUT.layers_per_rank)
            for part in LAYOUT.parts
        ]
        # Blocks of other requests, between the blocks of honest transfers.
        singles = sorted((pool.hold(1) for _ in range(NUM_BLOCKS)), key=lambda one: int(one.ids[0]))
        for one in singles[::2]:
            one.release()
        self._others = singles[1::2]
        self._held = [int(one.ids[0]) for one in self._others]
        self._watched = np.frombuffer(memoryview(self._vault), np.uint8)
        self._repaint()
        self._counters: list[Counter] = []

    async def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        match command.pop("do"):
            case "state":
                return self._state()
            case "changed":
                return {"changed": self._changed()}
            case "repaint":
                self._repaint()
                return {}
            case "grant":
                return self._grant(**command)
            case "release":
                self._counters[command["counter"]].release()
                return {}
            case "push":
                return await self._push(**command)
            case "send":
                return await self._send(**command)
            case "receive":
                return await self._receive(**command)
        raise ValueError(command)

    def _state(self) -> dict[str, Any]:
        """Returns the state that an attack must not change, and the metrics that must count it."""
        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines()
        )
        return {
            "stats": self._engine.stats(),
            "refusals": {**self._engine.refusals(), **self._endpoint.refusals()},
            "metrics": self._metrics.render().decode(),
            "anonymous": int(status["RssAnon"].split()[0]) << 10,
            "threads": int(status["Threads"]),
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "counts": [counter.value for counter in self._counters],
            "free": self._pool.num_free,
        }

    def _repaint(self) -> None:
        self._watched[:] = PATTERN
        for plane in self._planes:
            plane[self._held] = PATTERN

    def _changed(self) -> int:
        """Returns the number of bytes of the pattern that were overwritten."""
        found = int((self._watched != PATTERN).sum())
        return found + sum(int((plane[self._held] != PATTERN).sum()) for plane in self._planes)

    def _grant(self, peer: str | None) -> dict[str, Any]:
        """Grants the middle of the vault to one named peer. For None, makes only a counter, for any
        peer."""
        if peer is None:
            counter, key = self._engine.counter(), b""
        else:
            found = next(one for one in self._engine.peers if one.name == peer)
            counter = self._engine.counter(found)
            (key,) = counter.grant([(self._vault.region, VAULT_BYTES // 2, GRANT_BYTES)])
        self._counters.append(counter)
        return {
            "counter": len(self._counters) - 1,
            "imm": counter.imm,
            "key": int.from_bytes(key[20:28], "little"),
        }

    async def _push(self, peer: str) -> dict[str, Any]:
        """Writes from the vault to a peer over any common fabric. The result is ignored."""
        found = next(one for one in self._engine.peers if one.name == peer)
        descriptor = b"KMR\x01" + bytes.fromhex(found.engine_id) + bytes(8) * 2
        descriptor += VAULT_BYTES.to_bytes(8, "little")
        found.write(self._vault.region, descriptor, length=4096)
        return {}

    async def _send(self, tickets: list[str], lease: float = 60.0) -> dict[str, Any]:
        """Runs the prefill side of one transfer for each ticket."""
        errors = []
        with self._pool.hold(HONEST_BLOCKS) as hold:
            for plane, pages in enumerate(self._planes):
                for index, block in enumerate(hold.ids.tolist()):
                    pages[block] = _value(plane, index)
            for ticket in tickets:
                try:
                    async with self._endpoint.prefill_session(
                        ticket, hold, lease_seconds=lease
                    ) as session:
                        for layer in range(LAYOUT.layers_per_rank):
                            session.write_layer(layer)
                        await session.finish(b"tail")
                except KvxferError as error:
                    errors.append(f"{error.code}: {error}")
        return {"errors": errors}

    async def _receive(
        self, tickets: list[str], address: str, lease: float = 60.0
    ) -> dict[str, Any]:
        """Runs the decode side. Compares the bytes of every transfer after its measured time."""
        wrong = 0
        seconds: list[float] = []
        errors: list[str] = []
        for ticket in tickets:
            begun = time.perf_counter()
            try:
                async with self._endpoint.decode_session(
                    ticket, address, HONEST_BLOCKS, lease_seconds=lease
                ) as session:
                    await session.wait()
                    with session.take() as hold:
                        seconds.append(time.perf_counter() - begun)
                        wrong += self._wrong(hold.ids.tolist())
            except KvxferError as error:
                errors.append(f"{error.code}: {error}")
        return {"errors": errors, "seconds": seconds, "wrong": wrong}

    def _wrong(self, ids: list[int]) -> int:
        """Returns the number of wrong bytes of a transfer. Clears its blocks for the next one."""
        wrong = sum(
            int((pages[block] != _value(plane, index)).sum())
            for plane, pages in enumerate(self._planes)
            for index, block in enumerate(ids)
        )
        for pages in self._planes:
            pages[ids] = 0
        return wrong


def _value(plane: int, index: int) -> int:
    """Returns the value of each byte in a page of an honest transfer; never 0."""
    return 1 + (plane * 31 + index) % 251


async def main(instance: str, fabric: str, *, checksums: bool) -> None:
    logging.getLogger("kvxfer").setLevel(logging.ERROR)  # every attack logs a warning
    async with kv_endpoint(
        *(instance, LAYOUT, NUM_BLOCKS),
        key=KEY,
        epoch=EPOCH,
        checksums=checksums,
        fabrics=(fabric,),
        peer_timeout=3.0,  # longer than a busy machine stalls; the test freezes no worker
    ) as parts:
        worker = Worker(*parts)
        tasks: set[asyncio.Task[None]] = set()

        async def respond(command: dict[str, Any]) -> None:
            ident = command.pop("id")
            report(id=ident, **await worker.answer(command))

        report("ready", address=parts[0].address)
        async for command in commands():
            task = asyncio.create_task(respond(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], checksums="checksums" in sys.argv[3:]))
