"""Pooled connections to workers. Reads have no timeout: the request's deadlines bound them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import httpx2

_TIMEOUTS: Final = {"timeout": {"connect": 2.0, "write": 10.0, "read": None, "pool": None}}
"""Seconds. The reader of an answer bounds its time."""
_LIMITS: Final = httpx2.Limits(
    max_connections=None,
    max_keepalive_connections=512,
    # Engines close idle connections later (vLLM: 5 s), so no request meets one being closed.
    keepalive_expiry=2.0,
)
# A URL with a long query of a client is rarely used again.
_LONGEST_KEPT: Final = 256
_kept_url = functools.lru_cache(1024)(httpx2.URL)


class WorkerConnections:
    """Connections to workers that are kept open. Loop only.

    httpx2's client is not used: it sends the cookies of an answer with the requests of others, and
    takes a seventh of a request's time.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        def pool() -> httpx2.AsyncBaseTransport:
            return httpx2.AsyncHTTPTransport(limits=_LIMITS, trust_env=False)

        # Each request searches its pool at its begin and end, so streams have their own.
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
        """Returns the head of the answer, which its reader closes. `decode`: the answer takes as
        long as the client's. Raises httpx2.RequestError."""
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
        """Returns a whole answer."""
        response = await self.send("GET", url, headers)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    async def aclose(self) -> None:
        await self._streams.aclose()
        await self._short.aclose()
