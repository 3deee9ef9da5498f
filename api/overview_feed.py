"""Overviews of the fleet for all watchers, with pauses that bound their part of the time."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvxfer.scheduler.overview import look

if TYPE_CHECKING:
    from kvxfer.clock import Clock
    from kvxfer.overview import Overview, OverviewQuery
    from kvxfer.scheduler.registry import Registry
    from kvxfer.scheduler.scaling.history import ScalingHistory

# The pause after an overview, as a multiple of the CPU time that it took.
_PAUSE: Final = 9
_LONGEST_PAUSE: Final = 2.0
_KEPT: Final = 64


class OverviewFeed:
    """A source of overviews. One event loop. Equal queries at one time get the same overview."""

    def __init__(self, registry: Registry, scaling: ScalingHistory, clock: Clock) -> None:
        self._registry = registry
        self._scaling = scaling
        self._clock = clock
        self._turn = asyncio.Lock()
        self._not_before = 0.0
        # Each overview, with the time until which it is valid.
        self._looks: OrderedDict[OverviewQuery, tuple[float, Overview]] = OrderedDict()

    async def look(self, query: OverviewQuery) -> Overview:
        """Returns an overview of the fleet now, or of a moment ago if the fleet is large.

        Raises ControlPlaneUnavailable.
        """
        async with self._turn:
            found = self._looks.get(query)
            if found is not None and self._clock.monotonic() < found[0]:
                return found[1]
            await asyncio.sleep(max(self._not_before - self._clock.monotonic(), 0.0))
            began = time.thread_time()
            overview = await self._look(query)
            pause = _PAUSE * (time.thread_time() - began)
            self._not_before = self._clock.monotonic() + min(pause, _LONGEST_PAUSE)
            self._looks[query] = self._not_before, overview
            self._looks.move_to_end(query)
            while len(self._looks) > _KEPT:
                self._looks.popitem(last=False)
            return overview

    async def _look(self, query: OverviewQuery) -> Overview:
        registry, now = self._registry, self._clock.unix()
        statistics = await registry.statistics()
        return await look(
            await registry.instances(),
            await registry.transfers(),
            query,
            now=now,
            sent=await registry.sent(),
            transfers_opened=statistics.transfers_opened,
            updates=await registry.updates(),
            stale_seconds=registry.stale_seconds,
            scaling=self._scaling.summary(now),
        )
