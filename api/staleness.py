"""The header of answers that tell what was last known, while the registry is unavailable."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvxfer.scheduler.registry import Registry

HEADER: Final = "Kvxfer-Stale-Seconds"
DESCRIPTION: Final = (
    "Present while the registry is unavailable: the age, in seconds, of the last known state that "
    "the answer tells."
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
