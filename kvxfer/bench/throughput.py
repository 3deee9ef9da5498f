"""GB/s and pages/s of one case, round by round beside its limit."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.bench.cases import Case
from kvxfer.bench.figures import ThroughputFigure, throughput_figure
from kvxfer.bench.limits import Limits
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair


async def measure_throughput(
    pair: Pair,
    limits: Limits,
    case: Case,
    first_draw: PageDraw,
    rounds: int,
    advance: Callable[[], None],
) -> ThroughputFigure:
    """Engine and limit move the same pages, in turn first, `rounds` times after one that does not
    count. Each round draws new pages. Its first request does not count either: it wakes both
    processes, and their cores, from the checks and pauses before."""
    engine_ns: list[list[int]] = []
    limit_ns: list[list[int]] = []
    for index in range(rounds + 1):
        draw = first_draw.of_round(index)
        if index % 2:
            limit = await limits.transfer(case.limit, draw, pair.region.address)
            engine = await pair.transfer(draw)
        else:
            engine = await pair.transfer(draw)
            limit = await limits.transfer(case.limit, draw, pair.region.address)
        if index:
            engine_ns.append(engine[1:])
            limit_ns.append(limit[1:])
        advance()
    return throughput_figure(
        case, first_draw.page_bytes, first_draw.request_bytes, engine_ns, limit_ns
    )
