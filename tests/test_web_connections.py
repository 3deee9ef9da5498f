"""A server ends connections whose clients do not send requests in time, or are too many."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from kvxfer.web.connections import BoundedProtocol
from kvxfer.web.listener import ConnectionLimits, bind, url_of
from kvxfer.web.server import Server
from verify.polling import eventually

from .test_keep_alive import HurriedLoop, application

pytestmark = pytest.mark.native

LIMITS = ConnectionLimits(header_seconds=10, body_seconds=30, max_connections=3)
HEAD = b"POST /%s HTTP/1.1\r\nhost: h\r\ncontent-length: 1000\r\n\r\n"
GET = b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n"


class Reading:
    """An application, and how its reading of bodies ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.app = application()
        self.app.post("/read")(self.read)
        self.app.post("/refuse")(self.refuse)

    async def read(self, request: Request) -> Response:
        message: dict[str, Any] = {"more_body": True}
        while message.get("more_body"):
            message = dict(await request.receive())
        self.ends.append(message["type"])
        return Response(b"read")

    async def refuse(self) -> Response:
        return Response(status_code=401)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, content: bytes) -> None:
        self._writer.write(content)

    async def head(self) -> bytes:
        """Reads an answer and returns its status line."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await self._reader.readexactly(int(length or 0))
        return head.partition(b"\r\n")[0]

    async def rest(self) -> bytes:
        """Returns all bytes until the server closes the connection."""
        with contextlib.suppress(ConnectionError):
            return await self._reader.read()
        return b""

    @property
    def closed(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


class Connect:
    """Connects clients to a server."""

    def __init__(self, connect: Callable[[], Awaitable[Client]], server: Server) -> None:
        self._connect, self._server = connect, server

    async def __call__(self) -> Client:
        return await self._connect()

    @property
    def there(self) -> list[BoundedProtocol]:
        """The connections that the server has."""
        return [*self._server.server_state.connections]

    async def heard(self, sent: bytes) -> None:
        """Returns once the server has read the beginning of the one request."""
        if sent.startswith(b"POST"):
            await eventually(lambda: self.there and self.there[0].cycle is not None)
        elif sent.startswith(b"GET"):
            await eventually(lambda: self.there and self.there[0].headers is not None)


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[Connect]:
    """Runs a server and yields a way to connect clients to it."""
    with bind("127.0.0.1", 0) as listener:
        server = Server(app, listener, lambda url: None, limits=LIMITS)
        port = int(url_of(listener).rpartition(":")[2])
        running = asyncio.create_task(server.serve(sockets=[listener]))
        clients: list[Client] = []

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
            return clients[-1]

        try:
            yield Connect(connect, server)
        finally:
            for client in clients:
                client.close()
            server.should_exit = True
            await running


Scenario = Callable[[Connect, HurriedLoop], Awaitable[None]]


def run(scenario: Scenario, reading: Reading | None = None) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HurriedLoop)
        async with serving((reading or Reading()).app) as connect:
            await scenario(connect, loop)

    with asyncio.Runner(loop_factory=HurriedLoop) as runner:
        runner.run(main())


@pytest.mark.parametrize(
    ("sent", "seconds", "answer"),
    [
        (b"", 10, b""),
        (b"\r\n", 10, b""),
        (GET[:-2], 10, b"HTTP/1.1 408 Request Timeout"),
        (HEAD % b"read", 30, b"HTTP/1.1 408 Request Timeout"),
        (HEAD % b"read" + b"x" * 999, 30, b"HTTP/1.1 408 Request Timeout"),
    ],
    ids=["silent", "empty line", "headers", "no body", "body"],
)
def test_connection_ends_if_its_request_does_not_arrive(sent, seconds, answer):
    reading = Reading()

    async def scenario(connect, loop):
        client = await connect()
        client.send(sent)
        await connect.heard(sent)
        await loop.pass_by(seconds - 3)
        assert not client.closed
        await loop.pass_by(4)
        told = await client.rest()
        assert told.partition(b"\r\n")[0] == answer

    run(scenario, reading)
    assert reading.ends == (["http.disconnect"] if sent.startswith(b"POST") else [])


def test_trickling_bytes_do_not_extend_the_time():
    async def scenario(connect, loop):
        client = await connect()
        for byte in range(len(GET) - 2):
            client.send(GET[byte : byte + 1])
            await loop.pass_by(1)
            if client.closed:
                break
        await client.rest()
        assert client.closed  # before its headers were whole

    run(scenario)


def test_connection_ends_if_its_body_continues_after_the_answer():
    async def scenario(connect, loop):
        client = await connect()
        client.send(HEAD % b"refuse")
        assert await client.head() == b"HTTP/1.1 401 Unauthorized"
        for _ in range(40):
            client.send(b"x")
            await loop.pass_by(1)
        assert client.closed

    run(scenario)


def test_connection_of_a_client_that_sends_in_time_is_kept():
    async def scenario(connect, loop):
        client = await connect()
        for _ in range(2):
            client.send(HEAD % b"read" + b"x" * 500)
            await eventually(lambda: _reads_body(connect.there))
            await loop.pass_by(25)
            client.send(b"x" * 500)
            assert await client.head() == b"HTTP/1.1 200 OK"
            await loop.pass_by(60)  # a connection may be idle between requests
            for _ in range(12):  # past a check of all connections
                await loop.pass_by(0.1)
        client.send(GET)
        assert await client.head() == b"HTTP/1.1 200 OK"

    run(scenario)


def _reads_body(there: list[BoundedProtocol]) -> bool:
    cycle = there[0].cycle if there else None
    return cycle is not None and not cycle.response_complete


def test_a_server_refuses_connections_beyond_its_limit_with_503():
    async def scenario(connect, loop):
        kept = [await connect() for _ in range(3)]
        for client in kept:
            client.send(GET)
            assert await client.head() == b"HTTP/1.1 200 OK"
        refused = await (await connect()).rest()
        assert refused.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"retry-after: 1" in refused
        assert b"3 connections, as many as it allows" in refused
        kept.pop().close()
        await eventually(lambda: len(connect.there) < 3)
        again = await connect()
        again.send(GET)
        assert await again.head() == b"HTTP/1.1 200 OK"

    run(scenario)
