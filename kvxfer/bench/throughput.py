"""GB/s and pages/s of one case, round by round beside its limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvxfer.bench.cases import Case
from kvxfer.bench.figures import ThroughputFigure, throughput_figure
from kvxfer.bench.limits import Limits
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair

# Moves the requests of a draw one after the other; returns the nanoseconds of each.
Mover = Callable[[PageDraw], Awaitable[list[int]]]


async def measure_throughput(
    pair: Pair,
    limits: Limits,
    case: Case,
    first_draw: PageDraw,
    rounds: int,
    advance: Callable[[], None],
) -> ThroughputFigure:
    """Moves the same pages by the engine and by the limit, which take turns at being first."""

    async def limit(draw: PageDraw) -> list[int]:
        return await limits.transfer(case.limit, draw, pair.region.address)

    engine_ns, limit_ns = await in_turn((pair.transfer, limit), first_draw, rounds, advance)
    return throughput_figure(
        case, first_draw.page_bytes, first_draw.request_bytes, engine_ns, limit_ns
    )


async def in_turn(
    movers: Sequence[Mover], first_draw: PageDraw, rounds: int, advance: Callable[[], None]
) -> list[list[list[int]]]:
    """Returns the nanoseconds of each mover, by round and request. Each mover takes every round,
    and they take turns at being first: `rounds` rounds after one that does not count. Each round
    draws new pages. Its first request does not count either: it wakes both processes, and their
    cores, from the checks and pauses before.
    """
    taken: list[list[list[int]]] = [[] for _ in movers]
    for index in range(rounds + 1):
        draw = first_draw.of_round(index)
        of_round = list(zip(movers, taken, strict=True))
        for mover, samples in reversed(of_round) if index % 2 else of_round:
            nanoseconds = await mover(draw)
            if index:
                samples.append(nanoseconds[1:])
        advance()
    return taken
