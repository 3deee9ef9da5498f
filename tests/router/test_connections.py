"""The router on real sockets: it keeps its connections to workers, and a slow client holds decode
back."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

import httpx2
import pytest
from fastapi import FastAPI, Request, Response

from kvxfer.instances import Role
from kvxfer.web.answer import DONE, EventStream
from tests.network import Answer, Reply, worker_app
from verify.processes.control_plane import RunningControlPlane

from .servers import PREFILLS, RunningRouter, chunk, http_worker

pytestmark = pytest.mark.native

ASKED: Final = {"model": "llama", "prompt": "hi"}
# More than the four ends of two connections hold: Linux lets a receive buffer grow to tcp_rmem's
# third value, 32 MiB on large machines.
SOCKETS_HOLD: Final = 256 << 20


@pytest.fixture
def control_plane() -> Iterator[RunningControlPlane]:
    with RunningControlPlane(lease_seconds=600) as running:
        yield running


@contextlib.asynccontextmanager
async def routed(
    control_plane: RunningControlPlane, prefill: Any, decode: Any, **settings: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a router whose workers are these two applications."""
    with RunningRouter(control_plane.url, **settings) as router:
        async with (
            http_worker(control_plane.url, "p", Role.PREFILL, prefill),
            http_worker(control_plane.url, "d", Role.DECODE, decode),
            httpx2.AsyncClient(base_url=router.url, timeout=None) as client,
        ):
            yield client


async def test_a_cookie_of_a_worker_is_its_clients_alone(
    control_plane: RunningControlPlane,
) -> None:
    cookies: list[dict[str, str]] = []
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        cookies.append(dict(request.cookies))
        return Response(b"{}", headers={"Set-Cookie": "who=first"})

    async with routed(control_plane, app, app) as client:
        answers = [await client.post("/v1/completions", json=ASKED) for _ in range(2)]
    assert [answer.headers["set-cookie"] for answer in answers] == ["who=first"] * 2
    assert cookies == [{}] * 4


async def test_connections_to_workers_are_kept(control_plane: RunningControlPlane) -> None:
    """An answer that is not read to its end costs one connection."""
    connections: set[Any] = set()
    app = FastAPI()

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        connections.add(request.client)
        if not (await request.json())["stream"]:
            return Response(b"{}")

        async def events() -> AsyncGenerator[bytes, None]:
            for event in (chunk("a", "stop"), DONE):
                yield event

        return EventStream(events())

    async with routed(control_plane, app, app) as client:
        for stream in (True, False) * 3:
            answer = await client.post("/v1/completions", json={**ASKED, "stream": stream})
            assert answer.status_code == 200
    assert len(connections) == 2


def endless(sent: collections.Counter[str]) -> Answer:
    """Streams without an end; `sent` counts, by prompt, the bytes that were written."""

    async def send(body: dict[str, Any], reply: Reply) -> None:
        await reply.begin(200, "text/event-stream")
        event = chunk("x" * 50_000)
        while True:
            await reply.write(event)
            sent[body["prompt"]] += len(event)
            await asyncio.sleep(0)  # uvicorn neither sends nor waits once the client has left

    return send


def stream(client: httpx2.AsyncClient, prompt: str) -> Any:
    body = {**ASKED, "prompt": prompt, "stream": True}
    return client.stream("POST", "/v1/completions", json=body)


async def take(body: AsyncIterator[bytes], nbytes: int) -> None:
    """Reads at least `nbytes`."""
    while nbytes > 0:
        nbytes -= len(await anext(body))


async def test_a_slow_client_holds_decode_back_and_not_the_stream_in_memory(
    control_plane: RunningControlPlane,
) -> None:
    """While the client does not read one stream, decode stops sending it once the sockets between
    are full, and goes on with another stream of the same router. Without backpressure it would send
    the same amount of both, without an end."""
    sent: collections.Counter[str] = collections.Counter()
    async with (
        routed(control_plane, worker_app(PREFILLS), worker_app(endless(sent))) as client,
        stream(client, "slow") as slow,
        stream(client, "quick") as quick,
    ):
        slow_body, quick_body = slow.aiter_raw(), quick.aiter_raw()
        await anext(slow_body)
        held = -1
        while held != sent["slow"]:
            held = sent["slow"]
            assert held < SOCKETS_HOLD
            await take(quick_body, 8 << 20)
        await take(slow_body, held + (1 << 20))
