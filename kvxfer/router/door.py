"""The limits of requests under way, and of the bytes of their bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from starlette.types import Receive

from kvxfer.errors import Overloaded
from kvxfer.router.metrics import Metrics
from kvxfer.router.settings import RouterSettings
from kvxfer.web.answer import ClientLeft

ReadBody: TypeAlias = Callable[[Receive], Awaitable[bytes]]


class Door:
    """A count of requests from before their bodies are read until they are answered. Loop only."""

    def __init__(self, settings: RouterSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._requests = 0
        self._held = 0

    @contextmanager
    def entered(self) -> Iterator[ReadBody]:
        """Admits a request, and yields the function that reads its body. Both raise Overloaded; the
        function also raises ClientLeft. The bytes that it has read count until the request ends."""
        if self._requests >= self._settings.max_requests:
            raise self._overloaded(f"{self._requests} requests are under way")
        held = 0

        async def read(receive: Receive) -> bytes:
            nonlocal held
            parts: list[bytes] = []
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self._metrics.aborted.inc()
                    raise ClientLeft
                part = message.get("body", b"")
                if self._held + len(part) > self._settings.max_held_bytes:
                    raise self._overloaded(f"bodies of {self._held} bytes are under way")
                held += len(part)
                self._held += len(part)
                parts.append(part)
                more = message.get("more_body", False)
            return b"".join(parts)

        self._requests += 1
        self._metrics.running.inc()
        try:
            yield read
        finally:
            self._requests -= 1
            self._held -= held
            self._metrics.running.dec()

    def _overloaded(self, what: str) -> Overloaded:
        self._metrics.failures.labels(Overloaded.code).inc()
        return Overloaded(f"{what}, and this router takes no more; retry later")
