"""Idle HTTP connections: the client closes them first, so no request meets a closing one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI

from kvxfer.reference.worker.http_server import HttpServer
from kvxfer.web.listener import KEEP_ALIVE_SECONDS, bind, url_of
from kvxfer.web.server import Server

pytestmark = pytest.mark.native

# The keep-alive time of httpx2, and uvicorn's default.
CLIENT_SECONDS = 5.0


class HurriedLoop(asyncio.SelectorEventLoop):
    """A loop with real sockets, whose time can be moved on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def pass_by(self, seconds: float) -> None:
        """Moves time on by `seconds` and does what became due."""
        self.ahead += seconds
        for _ in range(10):
            await asyncio.sleep(0)


def application() -> FastAPI:
    app = FastAPI()
    app.state.stopping = asyncio.Event()

    @app.get("/healthz")
    async def healthz() -> None: ...

    return app


@pytest.mark.parametrize(
    "server_of",
    [
        lambda listener: HttpServer(application()),
        lambda listener: Server(application(), listener, lambda url: None),
    ],
    ids=["worker", "control plane"],
)
@pytest.mark.parametrize(
    ("idle", "opened"), [(CLIENT_SECONDS + 0.5, 1), (KEEP_ALIVE_SECONDS + 0.5, 2)]
)
def test_a_server_keeps_an_idle_connection_for_longer_than_clients_do(
    server_of: Callable[[Any], uvicorn.Server], idle: float, opened: int
) -> None:
    async def serve_two_requests() -> int:
        with bind("127.0.0.1", 0) as listener:
            server = server_of(listener)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                return await connections_of_two_requests(url_of(listener), idle)
            finally:
                server.should_exit = True
                await serving

    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        assert runner.run(serve_two_requests()) == opened


async def connections_of_two_requests(url: str, idle: float) -> int:
    """Counts the connections for two requests, `idle` apart, of a client that keeps connections."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HurriedLoop)
    opened = 0

    async def count(event: str, _details: object) -> None:
        nonlocal opened
        opened += event == "connection.connect_tcp.started"

    limits = httpx2.Limits(keepalive_expiry=None)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        for seconds in (idle, 0):
            answer = await client.get("/healthz", extensions={"trace": count})
            assert answer.status_code == 200
            await loop.pass_by(seconds)
    return opened
