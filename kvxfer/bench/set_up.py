"""The time of set-up: until the engine can use memory, and until the first byte is delivered to a
new peer."""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable

import numpy as np

from kvxfer.bench.cases import SourceMemory
from kvxfer.bench.channel import Channel
from kvxfer.bench.figures import (
    ConnectFigure,
    RegistrationFigure,
    connect_figure,
)
from kvxfer.bench.limits import Limits
from kvxfer.bench.pair import receiver_engine, source_memory
from kvxfer.bench.pool import HUGE_PAGE_BYTES, anonymous_pool
from kvxfer.engine import Engine


async def measure_connect(
    channel: Channel, limits: Limits, fabric: str, rounds: int, advance: Callable[[], None]
) -> ConnectFigure:
    """Connects a new engine to one receiver each round and writes one byte, and beside it a new raw
    TCP connection. Starting the engine and registering its memory is not counted."""
    engine_ns = []
    limit_ns = []
    async with receiver_engine(channel, (fabric,)) as receiver:
        for _ in range(rounds):
            async with receiver.sender() as engine:
                with source_memory(engine, SourceMemory.ALLOCATED, HUGE_PAGE_BYTES) as region:
                    start = time.monotonic_ns()
                    peer = await engine.connect(receiver.address)
                    await peer.write(region, receiver.descriptor, length=1)
                    engine_ns.append(time.monotonic_ns() - start)
            limit_ns.append(await limits.connect())
            advance()
    return connect_figure(fabric, engine_ns, limit_ns)


async def measure_registration(
    nbytes: int, rounds: int, advance: Callable[[], None]
) -> RegistrationFigure:
    """Allocates and registers `nbytes` with a new engine, `rounds` times."""
    alloc_ns, touched_ns, anonymous_ns, register_ns = [], [], [], []
    async with Engine(cluster_key=secrets.token_bytes(32), name="bench registration") as engine:
        for _ in range(rounds):
            start = time.monotonic_ns()
            memory = engine.alloc(nbytes)
            alloc_ns.append(time.monotonic_ns() - start)
            np.frombuffer(memoryview(memory), np.uint8)[:: mmap.PAGESIZE] = 1
            touched_ns.append(time.monotonic_ns() - start)
            memory.close()

            start = time.monotonic_ns()
            pool = anonymous_pool(nbytes)
            anonymous_ns.append(time.monotonic_ns() - start)

            start = time.monotonic_ns()
            region = engine.register(pool)
            register_ns.append(time.monotonic_ns() - start)
            region.close()
            advance()
    return RegistrationFigure(
        nbytes=nbytes,
        alloc_ns=float(np.median(alloc_ns)),
        touched_ns=float(np.median(touched_ns)),
        anonymous_touched_ns=float(np.median(anonymous_ns)),
        register_ns=float(np.median(register_ns)),
    )
