"""One id per request, in its answer and in all its log lines, and one log line at its end."""

from __future__ import annotations

import logging
import re
import secrets
from itertools import count
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from kvxfer.clock import SYSTEM_CLOCK, Clock

REQUEST_ID_HEADER: Final = "X-Request-ID"
REQUEST_ID_KEY: Final = "kvxfer.request_id"
"""A key in the scope of a request; so is CALLER_KEY, if the caller's name is known."""
CALLER_KEY: Final = "kvxfer.caller"

_log = logging.getLogger("kvxfer.api.requests")

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

# Generated ids: the process, and the request's sequence number.
_PROCESS: Final = secrets.token_hex(8)
_numbers: Final = count(1)


def is_request_id(text: str) -> bool:
    """Whether a client's id of a request can go into logs: no spaces, no control characters, at
    most 128 characters."""
    return _REQUEST_ID.fullmatch(text) is not None


def rename_request(scope: Scope, request_id: str) -> None:
    """Sets the id of the request in logs from here on, and in its answer."""
    scope[REQUEST_ID_KEY] = request_id
    bind_contextvars(request_id=request_id)


class LogRequests:
    """ASGI middleware. An X-Request-ID that a client sends is kept if it can go into logs."""

    def __init__(self, app: ASGIApp, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._clock.monotonic()
        sent = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        # The server gives each request its own context, so this is not reset.
        rename_request(scope, sent if is_request_id(sent) else f"{_PROCESS}-{next(_numbers)}")
        header = REQUEST_ID_HEADER.lower().encode()
        status = 500  # a defect is answered further out

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                name = (header, scope[REQUEST_ID_KEY].encode())
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if _log.isEnabledFor(logging.INFO):
                seconds = self._clock.monotonic() - began
                _log.info("request", extra=_about(scope, status, seconds))


def _about(scope: Scope, status: int, seconds: float) -> dict[str, object]:
    client = scope.get("client")
    return {
        "method": scope["method"],
        # The path, never the query; nothing that is secret is in a path.
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 6),
        "caller": scope.get(CALLER_KEY, "anonymous"),
        "address": client[0] if client else None,
    }
