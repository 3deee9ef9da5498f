"""A control plane or a router as a process: a bound socket, uvicorn on it, a graceful stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import uvicorn
from fastapi import FastAPI

from kvxfer.web.connections import BoundedConfig, BoundedProtocol, files_for
from kvxfer.web.listener import BACKLOG, KEEP_ALIVE_SECONDS, ConnectionLimits, url_of
from kvxfer.web.tls import ServerTls

_STOP_SECONDS: Final = 5
_TICKS_PER_SECOND: Final = 10  # uvicorn's
_LIMITS: Final = ConnectionLimits()


class Server(uvicorn.Server):
    """A server of one application on one bound socket.

    `announce` is called with the URL once connections are accepted. SIGTERM and SIGINT end `run`
    normally: the application's `state.stopping` is set, which closes watches, and requests under
    way may go on for `stop_seconds`. With `tls` it speaks HTTPS only.
    """

    def __init__(
        self,
        app: FastAPI,
        listener: socket.socket,
        announce: Callable[[str], None],
        *,
        tls: ServerTls | None = None,
        stop_seconds: int = _STOP_SECONDS,
        limits: ConnectionLimits = _LIMITS,
    ) -> None:
        most = files_for(limits.max_connections)
        super().__init__(
            BoundedConfig(
                app,
                limits=replace(limits, max_connections=most),
                lifespan="on",
                loop="uvloop",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=stop_seconds,
            )
        )
        self._stopping: asyncio.Event = app.state.stopping
        self._listener = listener
        self._announce = announce
        self._tls = tls
        if tls is not None:
            self.config.load()
            self.config.ssl = tls.context

    def serve_forever(self) -> None:
        """Blocks until a signal, or `should_exit`, ends it."""
        self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._announce(url_of(self._listener, tls=self._tls is not None))

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_SECOND == 0:
            if self._tls is not None:
                self._tls.refresh()
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedProtocol):
                    connection.end_late(now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A watch would keep its connection open for ever.
        self._stopping.set()
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again after its graceful stop, which makes a stop that went
        # well look like a crash.
        try:
            before = {
                s: signal.signal(s, self.handle_exit) for s in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # not the main thread, which handles signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
