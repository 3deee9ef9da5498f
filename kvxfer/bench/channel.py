"""Requests and answers between the two ends of a benchmark, as MessagePack. Nothing that is timed
goes through it."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from typing import Final, TypeVar

import msgspec

from kvxfer.bench.messages import Answer, Failed, HostRequest, Request
from kvxfer.engine import Peer
from kvxfer.errors import BenchError, DeadlineExceeded, PeerError, by_code

_LENGTH_BYTES = 4
_REQUEST = msgspec.msgpack.Decoder[Request](Request)
_ANSWER = msgspec.msgpack.Decoder[Answer](Answer)
# More than the receiver takes to fill, or to check, a pool as large as its memory.
_ANSWER_SECONDS: Final = 120.0

A = TypeVar("A", bound=Answer)


class Channel(ABC):
    """The sender's end: it asks, one request at a time."""

    async def call(self, request: Request | HostRequest, answer: type[A]) -> A:
        """Sends a request and returns its answer. Raises the error that the receiver raised, and
        BenchError if the receiver is gone."""
        match _ANSWER.decode(await self._exchange(request)):
            case Failed(code, text):
                raise by_code(code)(text)
            case decoded if isinstance(decoded, answer):
                return decoded
            case decoded:
                raise BenchError(f"{type(request).__name__} was answered by {decoded!r}")

    @abstractmethod
    async def _exchange(self, request: Request | HostRequest) -> bytes:
        """Sends the request; returns the encoded answer."""


class SocketChannel(Channel):
    """One end of a socket pair, of either side: length-prefixed messages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> SocketChannel:
        """Takes over one end of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def next_request(self) -> Request | None:
        """Returns the next request; None if the sender is gone."""
        message = await self._receive()
        return None if message is None else _REQUEST.decode(message)

    async def answer(self, answer: Answer) -> None:
        await self._send(answer)

    def close(self) -> None:
        self._writer.close()

    async def _exchange(self, request: Request | HostRequest) -> bytes:
        await self._send(request)
        message = await self._receive()
        if message is None:
            raise BenchError(
                f"the receiver process ended during {type(request).__name__}; its last words are "
                "on stderr"
            )
        return message

    async def _send(self, message: Request | HostRequest | Answer) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        await self._writer.drain()

    async def _receive(self) -> bytes | None:
        try:
            head = await self._reader.readexactly(_LENGTH_BYTES)
            return await self._reader.readexactly(int.from_bytes(head, "little"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


class PeerChannel(Channel):
    """Messages to an engine on another host, which has proved that it knows the cluster key."""

    def __init__(self, peer: Peer, where: str) -> None:
        self._peer, self._where = peer, where

    async def _exchange(self, request: Request | HostRequest) -> bytes:
        asked = type(request).__name__
        try:
            self._peer.send(msgspec.msgpack.encode(request))
            return await self._peer.receive(_ANSWER_SECONDS)
        except DeadlineExceeded:
            raise BenchError(
                f"the server at {self._where} did not answer {asked} within {_ANSWER_SECONDS:g} s; "
                "see what it prints, and start both again"
            ) from None
        except PeerError as error:
            raise BenchError(
                f"the server at {self._where} was lost during {asked}: {error}; see what it "
                "printed, and start both again"
            ) from error
