"""The router's HTTP API: OpenAI's, and what its operator asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx2
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.client import ControlPlaneClient
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import ControlPlaneUnavailable, KvxferError
from kvxfer.router import errors
from kvxfer.router.api_keys import ApiKeyGuard
from kvxfer.router.bodies import ChatBody, CompletionBody, read_body
from kvxfer.router.exchange import CHAT, COMPLETIONS, Chunk
from kvxfer.router.metrics import Metrics
from kvxfer.router.routing import Router
from kvxfer.router.settings import RouterSettings
from kvxfer.tracing.asgi import TraceRequests
from kvxfer.web.answer import DONE, EventStream, data_event, while_connected
from kvxfer.web.body_limit import LimitBodies
from kvxfer.web.request_log import REQUEST_ID_KEY, LogRequests

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
    """The router over a control plane, whose client and `tracer` it closes when it stops.

    `workers` carries its requests of workers, over sockets unless another one is given.
    """
    metrics = Metrics()
    router = Router(settings, control_plane, metrics, clock=clock, workers=workers)
    guard = ApiKeyGuard(settings.api_keys, clock)

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

    async def serve(
        request: Request,
        body: CompletionBody | ChatBody,
        prefix: str,
    ) -> Response:
        asked = replace(
            body.request(
                request.scope[REQUEST_ID_KEY], settings.bytes_per_token, clock.monotonic()
            ),
            headers={
                name: request.headers[name]
                for name in settings.forward_headers
                if name in request.headers
            },
        )
        own = {"id": f"{prefix}-{asked.request_id}"}
        if body.stream:
            pieces = _events(router.stream(asked), body.include_usage, own)
            return EventStream(pieces, stall_seconds=settings.client_seconds)
        completion = await while_connected(request.receive, router.complete(asked))
        return JSONResponse({**completion, **own})

    @app.post(COMPLETIONS)
    async def completions(request: Request) -> Response:
        guard.admit(request)
        body = read_body(CompletionBody, await request.body())
        return await serve(request, body, "cmpl")

    @app.post(CHAT)
    async def chat_completions(request: Request) -> Response:
        guard.admit(request)
        body = read_body(ChatBody, await request.body())
        return await serve(request, body, "chatcmpl")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        guard.admit(request)
        data = [
            {
                "id": name,
                "object": "model",
                "created": int(instance.registered_at),
                "owned_by": "kvxfer",
            }
            for name, instance in (await router.models()).items()
        ]
        return {"object": "list", "data": data}

    @app.get("/health")  # as inference servers have it
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
    app.add_middleware(_CountAnswers, metrics=metrics)
    if tracer is not None:
        app.add_middleware(TraceRequests, tracer=tracer, begins=True)
    app.add_middleware(LogRequests)
    return app


async def _events(
    chunks: AsyncGenerator[Chunk, None], include_usage: bool, own: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """A stream as the client gets it, with the router's `own` members. An error after the first
    token is its last event, and there is no [DONE]."""
    begun = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                begun = True
                if chunk["choices"] or include_usage:
                    yield data_event({**chunk, **own})
        except KvxferError as error:
            if not begun:
                raise
            yield data_event({"error": errors.error_object(error)})
            return
    yield DONE


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
