"""The sending ends of the probes, which measure the host without an engine."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import numpy as np

from kvxfer import _probes
from kvxfer.bench import messages as m
from kvxfer.bench.cases import Limit
from kvxfer.bench.channel import Channel
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.probe_end import TCP_BUFFER_BYTES, TCP_SECONDS, configure_tcp
from kvxfer.bench.receiver_process import ReceiverProcess
from kvxfer.errors import BenchError

MESSAGE_BYTES = 4096


class RawTcp:
    """One connection to the receiver, as a plain program would have it. Used on the event loop."""

    def __init__(self, channel: Channel, host: str, port: int) -> None:
        self._channel, self._host, self._port = channel, host, port
        self._buffer = np.ones(TCP_BUFFER_BYTES, np.uint8)
        self._connection: socket.socket | None = None

    @classmethod
    async def open(cls, channel: Channel, host: str) -> RawTcp:
        """Opens a raw connection. Raises OSError if the receiver's port cannot be reached."""
        tcp = cls(channel, host, (await channel.call(m.TcpListen(), m.TcpPort)).port)
        await tcp.connect()
        return tcp

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def fileno(self) -> int:
        if self._connection is None:
            raise BenchError("no raw connection is open")
        return self._connection.fileno()

    async def connect(self) -> int:
        """Opens a new raw connection and closes a former one. Returns the nanoseconds until its
        first byte was acknowledged."""
        self.close()
        accepted = asyncio.create_task(self._channel.call(m.TcpAccept(), m.Done))
        start = time.monotonic_ns()
        try:
            self._connection = socket.create_connection((self._host, self._port), TCP_SECONDS)
        except OSError:
            await asyncio.wait([accepted])  # the receiver gives up as well, and says so
            raise
        configure_tcp(self._connection)
        connected = time.monotonic_ns() - start
        await accepted
        (first_byte,) = await self.send(1, times=1)
        return connected + first_byte

    async def send(self, nbytes: int, times: int) -> list[int]:
        """Sends `nbytes` bytes `times` times. Returns the nanoseconds of each."""
        elapsed, _ = await asyncio.gather(
            asyncio.to_thread(_probes.tcp_send, self.fileno(), nbytes, times, self._buffer),
            self._channel.call(m.TcpReceive(nbytes, times), m.Done),
        )
        return elapsed


class Limits:
    """The limits, measured together with one receiver process. Used on the event loop, one
    measurement at a time."""

    def __init__(self, receiver: ReceiverProcess, tcp: RawTcp) -> None:
        self._channel, self._mailbox = receiver.channel, receiver.mailbox
        self._tcp = tcp
        _probes.allow_reader(receiver.pid)

    @classmethod
    async def open(cls, receiver: ReceiverProcess) -> Limits:
        return cls(receiver, await RawTcp.open(receiver.channel, "127.0.0.1"))

    def close(self) -> None:
        self._tcp.close()

    async def connect(self) -> int:
        """Connects as RawTcp does."""
        return await self._tcp.connect()

    async def transfer(self, limit: Limit, draw: PageDraw, source_address: int) -> list[int]:
        """Moves requests of the draw's size past the engine, checked byte for byte if it moves the
        draw's pages. `source_address` is the sender's pool. Returns the nanoseconds of each."""
        request: m.CopyPages | m.ReadPages
        match limit:
            case Limit.RAW_TCP:
                return await self._tcp.send(draw.request_bytes, draw.requests)
            case Limit.MEMCPY:
                request = m.CopyPages(draw)
            case Limit.READV:
                request = m.ReadPages(draw, os.getpid(), source_address)
        return (await self._channel.call(request, m.Durations)).nanoseconds

    async def latencies(self, limit: Limit, count: int, gap_ns: int) -> list[int]:
        """Returns the one-way latencies in nanoseconds of `count` messages of 4 KiB, each `gap_ns`
        after the former was acknowledged. Both sides spin if there is no gap and sleep if there is
        one, as an engine does."""
        spin = gap_ns == 0
        if limit is Limit.RAW_TCP:
            fd = self._tcp.fileno()
            sent, arrived = await asyncio.gather(
                asyncio.to_thread(_probes.tcp_ping, fd, MESSAGE_BYTES, count, gap_ns, spin),
                self._channel.call(m.TcpPong(MESSAGE_BYTES, count, spin), m.Times),
            )
        else:
            remote = None
            if limit is Limit.READV:
                page = np.frombuffer(self._mailbox, np.uint8)[_probes.MAIL_PAGE_OFFSET :]
                remote = (os.getpid(), page.ctypes.data)
            sent, arrived = await asyncio.gather(
                asyncio.to_thread(_probes.mailbox_post, self._mailbox, count, gap_ns, spin),
                self._channel.call(m.MailboxTake(count, spin, remote), m.Times),
            )
        return [there - here for here, there in zip(sent, arrived.at_ns, strict=True)]
