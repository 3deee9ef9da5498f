"""The control plane as a process: a bound socket, uvicorn on it, and a graceful stop."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from kvxfer.api.context import ControlPlane
from kvxfer.errors import AddressInUse, InvalidArgument, PermissionDenied

_BACKLOG: Final = 2048
_STOP_SECONDS: Final = 5


class ControlPlaneServer(uvicorn.Server):
    """Serves one application on one bound socket.

    `announce` is called with the URL once connections are accepted. SIGTERM and SIGINT end `run`
    normally: watches are closed, requests under way are answered, for at most 5 s.
    """

    def __init__(
        self, app: FastAPI, listener: socket.socket, announce: Callable[[str], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )
        self._control_plane: ControlPlane = app.state.control_plane
        self._listener = listener
        self._announce = announce

    def serve_forever(self) -> None:
        """Blocks until a signal, or `should_exit`, ends it."""
        self.run(sockets=[self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._announce(url_of(self._listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # A watch would keep its connection open for ever.
        self._control_plane.stopping.set()
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again after its graceful stop, which makes a stop that went
        # well look like a crash.
        try:
            before = {
                s: signal.signal(s, self.handle_exit) for s in (signal.SIGTERM, signal.SIGINT)
            }
        except ValueError:  # not the main thread: signals are somebody else's business
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, port 0 being any free one.

    Raises AddressInUse, PermissionDenied, or InvalidArgument where the host is none of this
    machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidArgument(
            f"host {host!r} is no address of this machine ({error.strerror}); "
            "use 127.0.0.1, or 0.0.0.0 for all"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_error(error: OSError, host: str, port: int) -> Exception:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(
            f"port {port} on {host} is taken; stop what listens there, or choose another port "
            "(0 takes any free one)"
        )
    if error.errno == errno.EACCES:
        return PermissionDenied(
            f"port {port} on {host} needs a privilege; choose a port from 1024 on"
        )
    return InvalidArgument(
        f"host {host!r} is no address of this machine ({error.strerror}); "
        "use 127.0.0.1, or 0.0.0.0 for all"
    )
