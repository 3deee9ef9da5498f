"""CPU seconds per GB moved, on each side."""

from __future__ import annotations

import time

from kvxfer.bench import messages as m
from kvxfer.bench.figures import CpuFigure
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair


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
