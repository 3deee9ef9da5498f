"""Answers say so while the registry is away and they tell what was last known."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.scheduler.registry import Registry

HEADER: Final = "Kvxfer-Stale-Seconds"
DESCRIPTION: Final = (
    "Present while the registry cannot be reached: the answer is what was last known, "
    "so many seconds ago."
)


class MarkStale:
    """ASGI middleware that puts the header on every answer while the registry is stale."""

    def __init__(self, app: ASGIApp, registry: Registry) -> None:
        self._app = app
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_mark(message: Message) -> None:
            if message["type"] == "http.response.start":
                stale = self._registry.stale_seconds
                if stale is not None:
                    MutableHeaders(scope=message)[HEADER] = f"{stale:.1f}"
            await send(message)

        await self._app(scope, receive, send_and_mark)
