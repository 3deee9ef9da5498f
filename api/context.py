"""What the routes of one application share, and how they get at it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request

from kvxfer.api.metrics import Metrics
from kvxfer.api.overview_feed import OverviewFeed
from kvxfer.api.settings import Settings
from kvxfer.api.trace_store import TraceStore
from kvxfer.clock import Clock
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler


@dataclass(frozen=True, slots=True)
class ControlPlane:
    settings: Settings
    registry: Registry
    clock: Clock
    metrics: Metrics
    autoscaler: Autoscaler
    overviews: OverviewFeed
    traces: TraceStore = field(default_factory=TraceStore)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the server begins to stop: watches end, readiness is refused."""


def control_plane(request: Request) -> ControlPlane:
    return cast(ControlPlane, request.app.state.control_plane)


async def _dependency(request: Request) -> ControlPlane:
    # Of an `async def`: FastAPI would call any other in a thread, once per request.
    return control_plane(request)


ControlPlaneDep = Annotated[ControlPlane, Depends(_dependency)]
