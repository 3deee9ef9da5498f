"""The application: routes, errors, metrics and the registry put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from kvxfer.api import audit, problems
from kvxfer.api.access import Guard, GuardedRoute, route_of
from kvxfer.api.context import ControlPlane
from kvxfer.api.heartbeats import AnswerHeartbeats
from kvxfer.api.metrics import MeasureRequests, Metrics
from kvxfer.api.openapi import describe
from kvxfer.api.openings import OpenTransfers, ReleaseTransfers
from kvxfer.api.overview_feed import OverviewFeed
from kvxfer.api.routes import (
    block_tables,
    caller,
    handshakes,
    instances,
    operations,
    overview,
    page,
    scale,
    traces,
    transfers,
    watch,
    weight_updates,
)
from kvxfer.api.settings import Settings
from kvxfer.api.staleness import MarkStale
from kvxfer.api.trace_store import own_tracer
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.kv.block_table import MAX_JSON_BYTES
from kvxfer.scaling import ScalePlan
from kvxfer.scheduler.admission import Admission
from kvxfer.scheduler.ending import end
from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.autoscaler import Autoscaler
from kvxfer.scheduler.scaling.history import ScalingHistory
from kvxfer.tracing.asgi import TraceRequests
from kvxfer.web.body_limit import LimitBodies
from kvxfer.web.request_log import LogRequests


def create_app(
    settings: Settings,
    registry: Registry,
    *,
    clock: Clock = SYSTEM_CLOCK,
    autoscaler: Autoscaler | None = None,
    sweep_seconds: float = 0.5,
) -> FastAPI:
    """Makes the control plane over `registry`, which it opens at start and closes at stop.

    `autoscaler` runs as long as the application, which closes it. Without one, a plan by the
    default policy is made on request. `sweep_seconds` is the longest delay until a watcher learns
    that a lease expired.
    """
    metrics = Metrics()
    planner = autoscaler or Autoscaler(registry, clock=clock)
    history = ScalingHistory()
    overviews = OverviewFeed(registry, history, clock)
    admission = Admission(
        registry,
        seconds=settings.transfer_seconds,
        max_waiting=settings.max_waiting,
        tenants=settings.tenants,
        clock=clock,
    )
    control_plane = ControlPlane(settings, registry, clock, metrics, planner, overviews, admission)

    def note_round(plan: ScalePlan) -> None:
        metrics.note_scaling(plan)
        audit.note_scaling(plan)
        history.note(plan)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await registry.open()
        tasks = [asyncio.create_task(_sweep(registry, sweep_seconds))]
        if autoscaler is not None:
            scaling = autoscaler.run(note_round, metrics.note_scaling_failure)
            tasks.append(asyncio.create_task(scaling))
        try:
            yield
        finally:
            for task in tasks:
                await end(task)
            admission.close()
            await planner.close()
            await registry.close()

    app = FastAPIOffline(  # /docs loads nothing from the internet
        redoc_url=None,
        title="kvxfer control plane",
        version="1",
        description=(
            "Registers and pairs prefill and decode workers. Errors are problem documents "
            "(RFC 9457) whose `code` is the stable name to program against."
        ),
        lifespan=lifespan,
    )
    app.state.control_plane = control_plane
    app.state.stopping = control_plane.stopping
    app.state.guard = guard = Guard(settings, clock)
    # Routes are tried in this order, so the busiest come first; and `watch` before `instances`,
    # whose route of one instance would take it for an id.
    modules = (
        transfers,
        block_tables,
        watch,
        instances,
        handshakes,
        weight_updates,
        scale,
        overview,
        traces,
        caller,
        operations,
        page,
    )
    routers = [module.router for module in modules]
    for router in routers:
        if unguarded := [r for r in router.routes if not isinstance(r, GuardedRoute)]:
            raise TypeError(f"{unguarded[0]} is open to all: make its router of GuardedRoute")
        # The routes themselves: an included router would be searched anew at each request.
        app.router.routes.extend(router.routes)
    problems.install(app, routers)
    for kind, router, endpoint in (
        (AnswerHeartbeats, instances.router, instances.heartbeat),
        (OpenTransfers, transfers.router, transfers.open_),
        (ReleaseTransfers, transfers.router, transfers.release),
    ):
        route = route_of(router, endpoint)
        app.add_middleware(kind, route=route, guard=guard, control_plane=control_plane)
    app.add_middleware(
        LimitBodies,
        max_bytes=settings.max_body_bytes,
        at_least={"/block-table": MAX_JSON_BYTES},
    )
    app.add_middleware(MarkStale, registry=registry)
    app.add_middleware(MeasureRequests, metrics=metrics, clock=clock)
    app.add_middleware(LogRequests, clock=clock)
    app.add_middleware(TraceRequests, tracer=own_tracer(control_plane.traces))
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


async def _sweep(registry: Registry, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        # A registry logs by itself that it is unavailable.
        with suppress(ControlPlaneUnavailable):
            await registry.sweep()
