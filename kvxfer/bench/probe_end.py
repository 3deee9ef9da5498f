"""The receiving ends of the probes, which measure the host without an engine."""

from __future__ import annotations

import asyncio
import mmap
import socket
import struct

import numpy as np
from numpy.typing import NDArray

from kvxfer import _probes
from kvxfer.bench import pattern
from kvxfer.bench.pages import PageLists
from kvxfer.bench.pool import anonymous_pool
from kvxfer.errors import BenchError

TCP_BUFFER_BYTES = 1 << 20
# Seconds until a raw connection is given up that does not open, or on which nothing moves.
TCP_SECONDS = 10.0


def configure_tcp(connection: socket.socket) -> None:
    """Sets no delay, and timeouts of blocking calls."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    patience = struct.pack("@ll", int(TCP_SECONDS), 0)
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, direction, patience)


class ProbeEnd:
    """The raw TCP connection to `host`, the shared mailbox, and a source pool of this process."""

    def __init__(
        self, pool: NDArray[np.uint8], mailbox: mmap.mmap, host: str = "127.0.0.1"
    ) -> None:
        self._pool = pool
        self._host = host
        self._mailbox = mailbox
        self._tcp_buffer = np.ones(TCP_BUFFER_BYTES, np.uint8)
        self._source: NDArray[np.uint8] | None = None
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None

    def close(self) -> None:
        for end in (self._listener, self._connection):
            if end is not None:
                end.close()

    def copy_pages(self, requests: list[PageLists]) -> list[int]:
        """Copies the requests' pages within this process. Returns the nanoseconds of each."""
        if self._source is None:
            self._source = anonymous_pool(len(self._pool))
            pattern.fill(self._source)
        return [
            _probes.copy_pages(self._source, pages.src, self._pool, pages.dst, pages.page_bytes)
            for pages in requests
        ]

    def read_pages(self, requests: list[PageLists], pid: int, address: int) -> list[int]:
        """Reads the requests' pages out of the sender's pool by process_vm_readv. Returns the
        nanoseconds of each."""
        return [
            _probes.read_pages(
                pid,
                address,
                len(self._pool),
                pages.src,
                self._pool,
                pages.dst,
                pages.page_bytes,
            )
            for pages in requests
        ]

    def listen(self) -> int:
        """Listens for the sender's raw connections; returns the port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._listener = socket.create_server((self._host, 0), family=family)
        self._listener.settimeout(TCP_SECONDS)
        return int(self._listener.getsockname()[1])

    async def accept(self) -> None:
        """Accepts the sender's raw connection and closes a former one."""
        if self._listener is None:
            raise BenchError("nothing listens for raw connections")
        if self._connection is not None:
            self._connection.close()
        connection, _ = await asyncio.to_thread(self._listener.accept)
        configure_tcp(connection)
        self._connection = connection

    async def tcp_receive(self, nbytes: int, times: int) -> None:
        await asyncio.to_thread(_probes.tcp_receive, self._fd, nbytes, times, self._tcp_buffer)

    async def tcp_pong(self, message_bytes: int, count: int, spin: bool) -> list[int]:
        return await asyncio.to_thread(_probes.tcp_pong, self._fd, message_bytes, count, spin)

    async def mailbox_take(
        self, count: int, spin: bool, remote: tuple[int, int] | None
    ) -> list[int]:
        return await asyncio.to_thread(_probes.mailbox_take, self._mailbox, count, spin, remote)

    @property
    def _fd(self) -> int:
        if self._connection is None:
            raise BenchError("no raw connection is open")
        return self._connection.fileno()
