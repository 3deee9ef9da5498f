"""The application: routes, errors, metrics and the registry put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

from fastapi import FastAPI

from kvxfer.api import problems
from kvxfer.api.context import ControlPlane
from kvxfer.api.metrics import MeasureRequests, Metrics
from kvxfer.api.openapi import describe
from kvxfer.api.routes import handshakes, instances, operations, transfers, watch
from kvxfer.api.settings import Settings
from kvxfer.api.staleness import MarkStale
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler.clock import Clock, SystemClock
from kvxfer.scheduler.registry import Registry


def create_app(settings: Settings, registry: Registry, *, clock: Clock | None = None) -> FastAPI:
    """The control plane over `registry`, which it opens when it starts and closes when it stops."""
    control_plane = ControlPlane(settings, registry, clock or SystemClock(), Metrics())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await registry.open()
        sweeper = asyncio.create_task(_sweep(registry, settings.sweep_seconds))
        try:
            yield
        finally:
            sweeper.cancel()
            with suppress(asyncio.CancelledError):
                await sweeper
            await registry.close()

    app = FastAPI(
        title="kvxfer control plane",
        version="1",
        description=(
            "Introduces prefill and decode workers to each other. Errors are problem documents "
            "(RFC 9457) whose `code` is the stable name to program against."
        ),
        lifespan=lifespan,
    )
    app.state.control_plane = control_plane
    # `watch` comes first: to the route of one instance it would be an id.
    routers = [m.router for m in (watch, instances, handshakes, transfers, operations)]
    for router in routers:
        app.include_router(router)
    problems.install(app, routers)
    app.add_middleware(MarkStale, registry=registry)
    app.add_middleware(MeasureRequests, metrics=control_plane.metrics)
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    return app


async def _sweep(registry: Registry, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        # A registry that is away says so itself.
        with suppress(ControlPlaneUnavailable):
            await registry.sweep()
