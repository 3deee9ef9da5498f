"""Cold connect: from nothing to the first byte delivered to a new peer."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvxfer.bench.cases import SourceMemory
from kvxfer.bench.channel import Channel
from kvxfer.bench.figures import ConnectFigure, connect_figure
from kvxfer.bench.limits import Limits
from kvxfer.bench.pair import receiver_engine, source_memory
from kvxfer.bench.pool import HUGE_PAGE_BYTES


async def measure_connect(
    channel: Channel, limits: Limits, fabric: str, rounds: int, advance: Callable[[], None]
) -> ConnectFigure:
    """A new engine each round connects to one receiver and writes one byte; beside it a new raw
    TCP connection does. Starting the engine and registering its memory is not counted."""
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
