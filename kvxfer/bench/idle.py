"""What an engine costs that has nothing to do."""

from __future__ import annotations

import asyncio
import time

from kvxfer.bench import messages as m
from kvxfer.bench.channel import Channel
from kvxfer.bench.figures import IdleFigure
from kvxfer.bench.pair import receiver_engine

# Long enough for connection set-up, and whatever spins after it, to be over.
_SETTLE_SECONDS = 1.0


async def measure_idle(channel: Channel, fabric: str, seconds: float) -> IdleFigure:
    """Connects one pair and leaves it alone. Counts the whole processes: engine, event loop and
    interpreter."""
    async with receiver_engine(channel, (fabric,)) as receiver, receiver.sender() as engine:
        await engine.connect(receiver.address)
        await asyncio.sleep(_SETTLE_SECONDS)
        receiver_before = (await channel.call(m.ReadCpuSeconds(), m.CpuSeconds)).seconds
        sender_before, start = time.process_time(), time.monotonic()
        await asyncio.sleep(seconds)
        elapsed = time.monotonic() - start
        sender = time.process_time() - sender_before
        receiver_after = (await channel.call(m.ReadCpuSeconds(), m.CpuSeconds)).seconds
    return IdleFigure(
        fabric=fabric,
        seconds=elapsed,
        sender_percent=100 * sender / elapsed,
        receiver_percent=100 * (receiver_after - receiver_before) / elapsed,
    )
