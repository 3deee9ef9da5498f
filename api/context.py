"""The objects that the routes of one application share, and their dependency."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from kvxfer.api.metrics import Metrics
from kvxfer.api.overview_feed import OverviewFeed
from kvxfer.api.settings import Settings
from kvxfer.api.trace_store import TraceStore
from kvxfer.clock import Clock
from kvxfer.scheduler import refusals
from kvxfer.scheduler.admission import Admission
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ControlPlane:
    settings: Settings
    registry: Registry
    clock: Clock
    metrics: Metrics
    autoscaler: Autoscaler
    overviews: OverviewFeed
    admission: Admission
    traces: TraceStore = field(default_factory=TraceStore)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop: watches end, readiness is refused."""

    async def unless_stopping(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. When the server begins to stop, cancels it and raises
        ControlPlaneUnavailable."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise refusals.stopping()
            return working.result()
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)


def control_plane(request: Request) -> ControlPlane:
    return cast(ControlPlane, request.app.state.control_plane)


async def _dependency(request: Request) -> ControlPlane:
    # An `async def`: FastAPI would call any other function in a thread, once per request.
    return control_plane(request)


ControlPlaneDep = Annotated[ControlPlane, Depends(_dependency)]
