"""CPU time: for each GB moved, and of engines that have nothing to do."""

from __future__ import annotations

import asyncio
import time

from kvxfer.bench import messages as m
from kvxfer.bench.channel import Channel
from kvxfer.bench.figures import CpuFigure, IdleFigure
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair, receiver_engine

# Long enough for connection set-up, and whatever spins after it, to be over.
_SETTLE_SECONDS = 1.0


async def measure_cpu(pair: Pair, draw: PageDraw) -> CpuFigure:
    """Moves all the draw's requests, one after the other; checking them is not counted."""
    transfer = await pair.prepare(draw)
    receiver_before = (await pair.channel.call(m.ReadCpuSeconds(), m.CpuSeconds)).seconds
    sender_before = time.process_time()
    await transfer.run()
    sender = time.process_time() - sender_before
    receiver = (await pair.channel.call(m.ReadCpuSeconds(), m.CpuSeconds)).seconds
    await transfer.check()
    gigabytes = draw.request_bytes * draw.requests / 1e9
    return CpuFigure(
        page_bytes=draw.page_bytes,
        nbytes=draw.request_bytes * draw.requests,
        sender_s_per_gb=sender / gigabytes,
        receiver_s_per_gb=(receiver - receiver_before) / gigabytes,
    )


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
