"""The cost of a checksum of pages, beside a copy of the same pages."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import numpy as np

from kvxfer import _probes
from kvxfer.bench.figures import ChecksumFigure, checksum_figure
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pool import anonymous_pool
from kvxfer.engine import Engine


async def measure_checksum(
    draws: list[PageDraw], rounds: int, advance: Callable[[], None]
) -> list[ChecksumFigure]:
    """Measures the requests of each draw, summed and copied in turn, cold in the cache."""
    figures = []
    pool_bytes = max(draw.pool_bytes for draw in draws)
    source, target = anonymous_pool(pool_bytes), anonymous_pool(pool_bytes)
    async with Engine(cluster_key=secrets.token_bytes(32), name="bench checksum") as engine:
        region = engine.register(source)
        for draw in draws:
            sum_ns: list[int] = []
            copy_ns: list[int] = []
            for number in range(rounds):
                for pages in draw.of_round(number).draw():
                    offsets, numbers = pages.src * pages.page_bytes, np.arange(len(pages.src))
                    start = time.monotonic_ns()
                    region.checksum(offsets, numbers, pages.page_bytes)
                    sum_ns.append(time.monotonic_ns() - start)
                    copy_ns.append(
                        _probes.copy_pages(source, pages.src, target, pages.dst, pages.page_bytes)
                    )
                advance()
            figures.append(checksum_figure(draw.page_bytes, draw.request_bytes, sum_ns, copy_ns))
    return figures
