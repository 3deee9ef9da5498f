"""A limit for the bytes that are read of a request's body."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No route reads a body with these methods.
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "DELETE", "OPTIONS"})


def too_large(limit: int) -> HTTPException:
    return HTTPException(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than the limit of {limit} bytes"
    )


class LimitBodies:
    """ASGI middleware: reading a body of more than `max_bytes` raises an HTTPException (413).

    `at_least` has the bytes that are read in any case, by the ending of the path. A body whose
    length is declared is refused before its first byte, any other one at the first byte beyond the
    limit.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, at_least: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._at_least = dict(at_least or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = max(
            self._max_bytes,
            *(n for ending, n in self._at_least.items() if scope["path"].endswith(ending)),
            0,
        )
        declared = headers.get("content-length", "")
        too_much = declared.isdecimal() and int(declared) > limit
        bounded = declared.isdecimal() or scope["method"] in _WITHOUT_BODY
        if bounded and not too_much and "transfer-encoding" not in headers:
            # The server passes on no more bytes than declared.
            await self._app(scope, receive, send)
            return
        answered = False
        size = 0

        async def receive_within_limit() -> Message:
            nonlocal size
            message = {} if too_much else await receive()
            size += len(message.get("body", b""))
            if not (too_much or size > limit):
                return message
            if answered:  # it is not read any more
                return {"type": "http.disconnect"}
            raise too_large(limit)

        async def send_and_note(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        await self._app(scope, receive_within_limit, send_and_note)
