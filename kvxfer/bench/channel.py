"""Requests and answers between the benchmark's two processes: length-prefixed MessagePack over a
socket pair. Nothing that is timed goes through it."""

from __future__ import annotations

import asyncio
import socket
from typing import TypeVar

import msgspec

from kvxfer.bench.errors import BenchError
from kvxfer.bench.messages import Answer, Failed, Request
from kvxfer.errors import by_code

_LENGTH_BYTES = 4
_REQUEST = msgspec.msgpack.Decoder[Request](Request)
_ANSWER = msgspec.msgpack.Decoder[Answer](Answer)

A = TypeVar("A", bound=Answer)


class Channel:
    """One end. The sender calls, the receiver takes and answers, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """Takes one end of a socket pair over."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def call(self, request: Request, answer: type[A]) -> A:
        """Sends a request and returns its answer. Raises what the receiver raised, and BenchError
        where its process is gone."""
        await self._send(request)
        message = await self._receive()
        if message is None:
            raise BenchError(
                f"the receiver process ended during {type(request).__name__}; its last words are "
                "on stderr"
            )
        match _ANSWER.decode(message):
            case Failed(code, text):
                raise by_code(code)(text)
            case decoded if isinstance(decoded, answer):
                return decoded
            case decoded:
                raise BenchError(f"{type(request).__name__} was answered by {decoded!r}")

    async def next_request(self) -> Request | None:
        """The next request; None when the sender is gone."""
        message = await self._receive()
        return None if message is None else _REQUEST.decode(message)

    async def answer(self, answer: Answer) -> None:
        await self._send(answer)

    def close(self) -> None:
        self._writer.close()

    async def _send(self, message: Request | Answer) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        await self._writer.drain()

    async def _receive(self) -> bytes | None:
        try:
            head = await self._reader.readexactly(_LENGTH_BYTES)
            return await self._reader.readexactly(int.from_bytes(head, "little"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
