"""Connections to workers: pooled, and patient only where a deadline of the request takes over."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import httpx2

_TIMEOUTS: Final = {"timeout": {"connect": 2.0, "write": 10.0, "read": None, "pool": None}}
"""In seconds. How long an answer may take is its reader's business."""
_LIMITS: Final = httpx2.Limits(
    max_connections=None,
    max_keepalive_connections=512,
    # Shorter than what engines wait (vLLM: 5 s): no request meets a connection being closed.
    keepalive_expiry=2.0,
)
# A client's query may be long, and another each time.
_LONGEST_KEPT: Final = 256
_kept_url = functools.lru_cache(1024)(httpx2.URL)


class WorkerConnections:
    """Sends requests over connections that are kept open. Loop only.

    Not by httpx2's client: that sends the cookies of an answer with the requests of others, and
    takes a seventh of a request's time.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        def pool() -> httpx2.AsyncBaseTransport:
            return httpx2.AsyncHTTPTransport(limits=_LIMITS, trust_env=False)

        # A pool is searched at begin and end of each request: streams have one, all else another.
        self._streams, self._short = transport or pool(), transport or pool()

    async def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes = b"",
        *,
        decode: bool = False,
    ) -> httpx2.Response:
        """The head of the answer, which its reader closes. `decode`: it takes as long as an answer
        to a client. Raises httpx2.RequestError."""
        extensions: dict[str, Any] = {**_TIMEOUTS}
        parsed = _kept_url(url) if len(url) <= _LONGEST_KEPT else httpx2.URL(url)
        request = httpx2.Request(
            method, parsed, headers=headers, content=content, extensions=extensions
        )
        transport = self._streams if decode else self._short
        response = await transport.handle_async_request(request)
        response.request = request
        return response

    async def get(self, url: str, headers: Mapping[str, str]) -> httpx2.Response:
        """A whole answer."""
        response = await self.send("GET", url, headers)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    async def aclose(self) -> None:
        await self._streams.aclose()
        await self._short.aclose()
