"""A client's connection: HTTP/1.1, persistent, one request at a time, its answer timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

import httptools

_TOKEN: Final = b'"text":'
_SILENCE_SECONDS: Final = 60.0


@dataclass(slots=True)
class Answer:
    """The received part of an answer. Times are in seconds since the request was sent."""

    status: int = 0
    first_seconds: float = 0.0
    """The time of the first byte of the body."""
    seconds: float = 0.0
    """The time of the end."""
    tokens: int = 0
    token_parts: int = 0
    """HTTP chunks that have tokens."""
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def expect(self, status: int, tokens: int = 0) -> Answer:
        """Returns itself. Raises RuntimeError for another answer, as the figures would mean
        something else."""
        whole = not tokens or (self.body.count(_TOKEN) == tokens and b"[DONE]" in self.parts[-1])
        if self.status != status or not whole:
            raise RuntimeError(f"an answer was {self.status} with {self.body.decode()[-500:]!r}")
        return self


class Connection(asyncio.Protocol):
    """One connection to a server. Loop only."""

    def __init__(self) -> None:
        self.answer = Answer()
        """The answer to the latest request."""
        self._began = 0.0
        loop = asyncio.get_running_loop()
        self._first: asyncio.Future[None] = loop.create_future()
        self._last: asyncio.Future[None] = loop.create_future()

    async def begin(self, content: bytes) -> None:
        """Sends a request. Returns with the first byte of the answer's body."""
        if self._transport.is_closing():
            raise ConnectionError("the server closed an idle connection")
        loop = asyncio.get_running_loop()
        self.answer = Answer()
        self._first, self._last = loop.create_future(), loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._began = time.perf_counter()
        self._transport.write(content)
        await asyncio.wait_for(self._first, _SILENCE_SECONDS)

    async def finish(self) -> Answer:
        """Returns with the end of the answer."""
        await asyncio.wait_for(self._last, _SILENCE_SECONDS)
        return self.answer

    async def ask(self, content: bytes) -> Answer:
        await self.begin(content)
        return await self.finish()

    # --- asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        for waiting in (self._first, self._last):
            if not waiting.done():
                waiting.set_exception(error or ConnectionError("the server closed a connection"))

    # --- the parser ------------------------------------------------------------------------------

    def on_body(self, part: bytes) -> None:
        answer = self.answer
        if not answer.parts:
            answer.first_seconds = time.perf_counter() - self._began
            self._first.set_result(None)
        answer.parts.append(part)
        tokens = part.count(_TOKEN)
        answer.tokens += tokens
        answer.token_parts += tokens > 0

    def on_message_complete(self) -> None:
        self.answer.seconds = time.perf_counter() - self._began
        self.answer.status = self._parser.get_status_code()
        for waiting in (self._first, self._last):
            if not waiting.done():
                waiting.set_result(None)

    def close(self) -> None:
        self._first.cancel()
        self._last.cancel()
        self._transport.close()


@asynccontextmanager
async def connected(url: str, connections: int) -> AsyncIterator[list[Connection]]:
    """Opens `connections` connections to the server at `url`."""
    address, loop = urlsplit(url), asyncio.get_running_loop()
    host, port = address.hostname or "", address.port or 0
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(connections):
            _, connection = await loop.create_connection(Connection, host, port)
            stack.callback(connection.close)
            made.append(connection)
        yield made
