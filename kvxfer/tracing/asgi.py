"""The span of a request that a server answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.tracing.span import HEADER, current, incoming, is_recorded

if TYPE_CHECKING:
    from kvxfer.tracing.tracer import Tracer

_HEADER: Final = HEADER.encode()
_REQUEST_ID_KEY: Final = "kvxfer.request_id"


class TraceRequests:
    """ASGI middleware. A request whose trace is recorded gets a span, if there is a tracer.

    `begins`: a POST without a trace begins one; for the servers that clients call.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer | None, *, begins: bool = False) -> None:
        self._app = app
        self._tracer = tracer
        self._begins = begins and tracer is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        traceparent = ""
        if scope["type"] == "http":
            for name, value in scope["headers"]:
                if name == _HEADER:
                    traceparent = value.decode("latin-1")
        if traceparent and is_recorded(traceparent):
            # Every request has its own context, so this is not reset.
            incoming.set(traceparent)
        elif not (self._begins and scope["type"] == "http" and scope["method"] == "POST"):
            await self._app(scope, receive, send)
            return
        span = None
        if self._tracer is not None:
            span = self._tracer.root(f"{scope['method']} {scope['path']}", traceparent)
        if span is None:
            await self._app(scope, receive, send)
            return
        current.set(span)
        status = 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        request_id = scope.get(_REQUEST_ID_KEY) or Headers(scope=scope).get("x-request-id")
        if request_id:
            span.set(request_id=request_id)
        try:
            await self._app(scope, receive, send_and_note)
        except BaseException as error:
            span.end(error)
            raise
        if route := getattr(scope.get("route"), "path", None):
            span.rename(f"{scope['method']} {route}")
        span.set(status=status)
        span.end(None if status < 500 else _Answered(status))


class _Answered(Exception):
    """A request that was answered with an error."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
