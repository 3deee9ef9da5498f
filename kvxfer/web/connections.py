"""HTTP connections with deadlines: no client holds one for ever with an unfinished request."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from kvxfer.web.listener import ConnectionLimits

_log = logging.getLogger("kvxfer.api")

_REFUSAL: Final = (
    b"HTTP/1.1 %s\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\n%s\r\n%s"
)
_LATE: Final = b"408 Request Timeout"


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with deadlines and a ceiling, from the `limits` of its config.

    A connection is in one of three states. It waits for headers, from its begin or from the first
    byte after an answer; it waits for a body; or the client has sent all of its request. In the
    first two it has a deadline, `due`, at which end_late() ends it. One look at all connections
    each second costs less than a timer for each request. uvicorn ends idle connections itself.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig)  # noqa: S101 (Server makes no other)
        self._limits = config.limits
        self.due: float | None = None
        self._headers_seen = self.headers  # set when a request's headers are complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.due = self.loop.time() + self._limits.header_seconds
        if len(self.connections) > self._limits.max_connections:
            most = self._limits.max_connections
            self._refuse(
                b"503 Service Unavailable",
                f"this server has {most} connections, as many as it allows; retry",
                b"retry-after: 1\r\n",
            )

    def data_received(self, data: bytes) -> None:
        if self.due is None and (self.cycle is None or self.cycle.response_complete):
            self.due = self.loop.time() + self._limits.header_seconds
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self.due = self.loop.time() + self._limits.body_seconds
        self._headers_seen = self.headers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.due = None
        super().on_message_complete()

    def end_late(self, now: float) -> None:
        """Ends the connection if its client is late."""
        if self.due is None or self.due > now or self.transport.is_closing():
            return
        self.due = None
        limits, cycle = self._limits, self.cycle
        answered = cycle is None or cycle.response_complete
        if answered and self.headers is self._headers_seen:
            self.transport.close()  # no request has begun
        elif answered:
            self._refuse(_LATE, f"no headers within {limits.header_seconds:g} s")
        elif not cycle.response_started:
            self._refuse(_LATE, f"no complete body within {limits.body_seconds:g} s")
        else:
            self.transport.abort()  # the client may not take the rest of its answer either

    def _refuse(self, status: bytes, detail: str, headers: bytes = b"") -> None:
        content = detail.encode() + b"\n"
        self.transport.write(_REFUSAL % (status, len(content), headers, content))
        self.transport.close()


class BoundedConfig(Config):
    """uvicorn's settings, and the limits of connections."""

    def __init__(self, app: Any, *, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, http=BoundedProtocol, **options)
        self.limits = limits


def files_for(connections: int) -> int:
    """Raises the number of files that this process may open, as far as permitted. Returns the
    number of connections that half of them allow, at most `connections`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < wanted:
        _log.info("at most %d connections: raise `ulimit -n` from %d", soft // 2, soft)
        return soft // 2
    return connections
