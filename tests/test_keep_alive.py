"""Idle HTTP connections: the client gives them up first, so no request meets one being closed."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import FastAPI

from kvxfer.http_listener import bind, url_of
from kvxfer.reference.worker.http_server import HttpServer

from .control_plane import RunningControlPlane

pytestmark = pytest.mark.native


# What httpx waits, and uvicorn by itself.
CLIENT_SECONDS = 5.0


async def test_a_server_keeps_an_idle_connection_for_longer_than_clients_do():
    app = FastAPI()

    @app.get("/healthz")
    async def healthz() -> None: ...

    with RunningControlPlane() as control_plane, bind("127.0.0.1", 0) as listener:
        server = HttpServer(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        used = await asyncio.gather(
            connections_of_two_requests(control_plane.url),
            connections_of_two_requests(url_of(listener)),
        )
        server.should_exit = True
        await serving
    assert used == [1, 1]


async def connections_of_two_requests(url: str) -> int:
    """With an idle time between them, and a client that would use its connection again."""
    opened = 0

    async def count(event: str, _details: object) -> None:
        nonlocal opened
        opened += event == "connection.connect_tcp.started"

    limits = httpx.Limits(keepalive_expiry=None)
    async with httpx.AsyncClient(base_url=url, timeout=20, limits=limits) as client:
        for idle in (CLIENT_SECONDS + 0.5, 0):
            answer = await client.get("/healthz", extensions={"trace": count})
            assert answer.status_code == 200
            await asyncio.sleep(idle)
    return opened
