"""The router's HTTP API: the routes of the inference engines behind it, and those for operators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.router import errors
from kvxfer.router.api_keys import ApiKeyGuard
from kvxfer.router.asked import read_request
from kvxfer.router.dialects import GENERATING, SINGLE, Dialect
from kvxfer.router.door import Door
from kvxfer.router.downstream import Passage, Serve
from kvxfer.router.metrics import Metrics
from kvxfer.router.routing import Router
from kvxfer.router.settings import RouterSettings
from kvxfer.tracing.asgi import TraceRequests
from kvxfer.web.body_limit import LimitBodies
from kvxfer.web.request_log import (
    CALLER_KEY,
    REQUEST_ID_HEADER,
    REQUEST_ID_KEY,
    LogRequests,
    rename_request,
)

if TYPE_CHECKING:
    from kvxfer.tracing.tracer import Tracer


def create_app(
    settings: RouterSettings,
    control_plane: ControlPlaneClient,
    tracer: Tracer | None = None,
    *,
    clock: Clock = SYSTEM_CLOCK,
    workers: httpx2.AsyncBaseTransport | None = None,
) -> FastAPI:
    """Makes a router over a control plane, whose client and `tracer` it closes when it stops.

    `workers` carries its requests to workers; by default, sockets do.
    """
    metrics = Metrics()
    router = Router(settings, control_plane, metrics, clock=clock, workers=workers)
    guard = ApiKeyGuard(settings.api_keys, clock)
    door = Door(settings, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with router:
            yield
        if tracer is not None:
            await asyncio.to_thread(tracer.close)

    app = FastAPI(title="kvxfer router", version="1", lifespan=lifespan, openapi_url=None)
    app.state.router = router
    app.state.stopping = stopping = asyncio.Event()
    errors.install(app)

    def passes(dialect: Dialect, method: str) -> None:
        async def passed(request: Request) -> Response:
            guard.admit(request)
            return Passage(partial(taken, request), door, settings.client_seconds)

        def taken(request: Request, content: bytes) -> Serve:
            asked = read_request(
                dialect,
                content,
                request_id=request.scope[REQUEST_ID_KEY],
                named=REQUEST_ID_HEADER in request.headers,
                path=request.url.path + (f"?{query}" if (query := request.url.query) else ""),
                method=method,
                content_type=request.headers.get("content-type", ""),
                headers={
                    name: request.headers[name]
                    for name in settings.forward_headers
                    if name in request.headers
                },
                tenant=request.scope.get(CALLER_KEY),
                arrived=clock.monotonic(),
            )
            rename_request(request.scope, asked.request_id)
            return partial(router.serve, asked)

        app.add_api_route(dialect.path, passed, methods=[method])

    for dialect in GENERATING:
        passes(dialect, "POST")
    for method, dialects in SINGLE.items():
        for dialect in dialects:
            passes(dialect, method)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        guard.admit(request)
        return {"object": "list", "data": await router.models.cards()}

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        guard.admit(request)
        return await router.models.card(name)

    @app.get("/health")  # the route of inference servers
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def ready() -> dict[str, str]:
        if stopping.is_set():
            raise ControlPlaneUnavailable("the router is stopping")
        await router.ready()
        return {"status": "ok"}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.add_middleware(LimitBodies, max_bytes=settings.max_body_bytes)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
        )
    app.add_middleware(_CountAnswers, metrics=metrics)
    if tracer is not None:
        app.add_middleware(TraceRequests, tracer=tracer, begins=True)
    app.add_middleware(LogRequests)
    return app


class _CountAnswers:
    """ASGI middleware that counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.requests.labels(route, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, send_and_note if scope["type"] == "http" else send)
