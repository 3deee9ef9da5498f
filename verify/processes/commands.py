"""The worker's side of worker.py: JSON commands from stdin, JSON events to stdout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

from kvxfer.engine import Engine
from kvxfer.kv.block_pool import BlockPool
from kvxfer.kv.cache import KvCache
from kvxfer.kv.endpoint import KvEndpoint
from kvxfer.kv.options import KvIdentity, KvOptions
from kvxfer.layout import KvLayout

_LONGEST: Final = 1 << 24


@contextlib.asynccontextmanager
async def kv_endpoint(
    instance: str,
    layout: KvLayout,
    num_blocks: int,
    *,
    key: bytes,
    epoch: int,
    checksums: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Engine, KvCache, BlockPool, KvEndpoint]]:
    """Runs the engine and endpoint of one end of transfers; `options` are the engine's."""
    async with Engine(cluster_key=key, name=instance, **options) as engine:
        cache, pool = KvCache.allocate(engine, layout, num_blocks), BlockPool(num_blocks)
        identity, of_it = KvIdentity(instance, key, epoch), KvOptions(checksums=checksums)
        async with KvEndpoint(engine, cache, pool, identity, of_it) as endpoint:
            yield engine, cache, pool, endpoint


def report(event: str = "", **fields: object) -> None:
    """Reports an event or, without one, the answer to the command whose `id` is among the
    fields."""
    told = {"event": event, **fields} if event else fields
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


async def commands() -> AsyncIterator[dict[str, Any]]:
    """Yields the driver's commands. The process ends with its driver.

    Does not use asyncio's reader of pipes, which allocates 256 KiB for each read and so fragments
    the heap. Some drivers measure the memory of their workers, and others leave them none.
    """
    stdin, lines = sys.stdin.fileno(), asyncio.StreamReader(limit=_LONGEST)
    loop = asyncio.get_running_loop()

    def read() -> None:
        if data := os.read(stdin, 4096):
            lines.feed_data(data)
        else:
            loop.remove_reader(stdin)
            lines.feed_eof()

    loop.add_reader(stdin, read)
    while line := await lines.readline():
        yield json.loads(line)
    os._exit(0)
