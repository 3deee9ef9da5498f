"""Latency of a single 4 KiB write until the receiver's counter shows it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvxfer.bench import messages as m
from kvxfer.bench.cases import Case
from kvxfer.bench.figures import LatencyFigure, latency_figure
from kvxfer.bench.limits import MESSAGE_BYTES, Limits
from kvxfer.bench.pair import Pair
from kvxfer.bench.settings import LatencySettings


async def measure_latency(
    pair: Pair,
    limits: Limits,
    case: Case,
    settings: LatencySettings,
    advance: Callable[[], None],
) -> LatencyFigure:
    """Measures single writes one after the other in each round, then as many messages of the
    limit."""
    gap_ns, writes = settings.gap_ns, settings.writes
    engine_ns: list[list[int]] = []
    limit_ns: list[list[int]] = []
    for _ in range(settings.rounds):
        engine_ns.append(await _engine_latencies(pair, gap_ns, writes))
        limit_ns.append(await limits.latencies(case.limit, writes, gap_ns))
        advance()
    return latency_figure(MESSAGE_BYTES, gap_ns, engine_ns, limit_ns)


async def _engine_latencies(pair: Pair, gap_ns: int, writes: int) -> list[int]:
    imms = (await pair.channel.call(m.NewCounters(writes), m.Counters)).imms
    submitted_ns = []
    for imm in imms:
        if gap_ns:
            await asyncio.sleep(gap_ns / 1e9)
        submitted_ns.append(time.monotonic_ns())
        await pair.peer.write(pair.region, pair.receiver.descriptor, length=MESSAGE_BYTES, imm=imm)
    arrived = await pair.channel.call(m.AwaitArrivals(), m.Times)
    return [there - here for here, there in zip(submitted_ns, arrived.at_ns, strict=True)]
