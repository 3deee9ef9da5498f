"""The engine of asyncio programs."""

from __future__ import annotations

import asyncio
from typing import Self, Unpack

from kvxfer.engine.core import EngineCore
from kvxfer.engine.counter import Counter
from kvxfer.engine.native import translated
from kvxfer.engine.options import EngineOptions
from kvxfer.engine.peer import Peer
from kvxfer.errors import EngineClosed, PeerLost


class Engine(EngineCore):
    """One transfer engine: enter it with `async with`.

    cluster_key: shared by all engines that may talk to each other, at least 16 bytes.
    options: see EngineOptions; one that is left out has its default.

    Raises InvalidArgument, AddressInUse, PermissionDenied or FabricUnavailable.
    """

    def __init__(self, *, cluster_key: bytes | str, **options: Unpack[EngineOptions]) -> None:
        super().__init__(cluster_key, options, thread=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: dict[int, asyncio.Future[int]] = {}

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.native.event_fd, self._drain)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends everything with EngineClosed and stops the engine's thread. Idempotent."""
        self._closed = True
        # Shielded: a cancelled close still closes, and other closers wait for the same end.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await asyncio.to_thread(self.native.close)
        self._drain()
        if self._loop is not None:
            self._loop.remove_reader(self.native.event_fd)
        self._forget_all()

    async def connect(self, address: str, timeout: float = 2.0) -> Peer:
        """Connects and authenticates; the existing Peer if that engine is connected. An address
        with an id of zeros means whichever engine listens there.

        Raises ConnectFailed, AuthenticationFailed or PeerRestarted.
        """
        if self._loop is None or self._closed:
            raise EngineClosed("enter the engine with `async with` before connecting")
        future: asyncio.Future[int] = self._loop.create_future()
        with translated():
            operation = self.native.connect(address, timeout)
        # Completions come on this loop, so none can have been missed in between.
        self._connecting[operation] = future
        try:
            peer_id = await future
        finally:
            self._connecting.pop(operation, None)
        peer = self._peers.get(peer_id)
        if peer is None:
            raise PeerLost(f"the peer at {address} was lost right after connecting")
        return peer

    def _connect_ended(self, ident: int, peer_id: int, error: Exception | None) -> None:
        future = self._connecting.get(ident)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(peer_id)
        else:
            future.set_exception(error)

    def _end_wait(self, counter: Counter, error: Exception) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(counter._resolve, error, 0)
