"""One address in front of several replicas, as a service of an orchestrator would be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Final

_CHUNK: Final = 1 << 16


class Balancer:
    """Gives each TCP connection to the next replica that takes it. Loop only."""

    def __init__(self, ports: Sequence[int]) -> None:
        self._ports = ports
        self._turn = count()
        self.url = ""

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Balancer]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = next(self._turn)
        for step in range(len(self._ports)):
            port = self._ports[(first + step) % len(self._ports)]
            with contextlib.suppress(OSError):
                theirs, ours = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_copy(reader, ours), _copy(theirs, writer))
                return
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()
