"""The HTTP side of a worker process: uvicorn on a bound socket."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from fastapi import FastAPI

from kvxfer.web.listener import KEEP_ALIVE_SECONDS

_STOP_SECONDS: Final = 5


class HttpServer(uvicorn.Server):
    """A server of one application on one listening socket, until `should_exit` is set.

    Running requests then get 5 s before they are cancelled. The caller handles signals.
    """

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_STOP_SECONDS,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
