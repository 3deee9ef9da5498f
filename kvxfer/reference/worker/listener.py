"""The HTTP side of a worker process: a listening socket and uvicorn on it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from kvxfer.errors import AddressInUse, InvalidArgument

_BACKLOG: Final = 256
_STOP_SECONDS: Final = 5


class HttpServer(uvicorn.Server):
    """Serves one application on one listening socket until `should_exit` is set.

    Running requests then get 5 s before they are cancelled. Signals are its caller's business.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on; port 0 takes any free one.

    Raises AddressInUse, or InvalidArgument where the host is none of this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"port {port} on {host} is taken; stop what listens there, or choose another port "
                "(0 takes any free one)"
            ) from error
        raise InvalidArgument(
            f"cannot listen on {host} port {port}: {error.strerror}; use an address of this "
            "machine and a port that you may use"
        ) from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
