"""Answers of an HTTP server that end when the client leaves, among them streams of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE: Final = b"data: [DONE]\n\n"

T = TypeVar("T")


class ClientLeft(HTTPException):
    """The client closed the connection, or stopped reading, before it had its answer."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left")  # this answer is not seen


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`, which is cancelled when the client disconnects.

    Call it once the request's body is read. When it returns, `work` has ended and released what it
    held. Raises ClientLeft.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def data_event(value: Any) -> bytes:
    """Returns one server-sent event without a name, as in OpenAI's streams."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Server-sent events, each sent before the next one is asked for.

    The answer begins with the first event: an error before it is raised, and answered as any other.
    `events` is closed when the client leaves, or takes nothing for `stall_seconds`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        stall_seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._stall_seconds = stall_seconds
        self.init_headers({"Cache-Control": "no-cache", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        with suppress(ClientLeft):
            await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        begun = False
        async with aclosing(self._events) as events:
            async for event in events:
                if not begun:
                    begun = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await self._send_part(send, event, more=True)
        await self._send_part(send, b"", more=False)

    async def _send_part(self, send: Send, part: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError:
            raise ClientLeft from None
