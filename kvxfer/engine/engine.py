"""The engine of asyncio programs."""

from __future__ import annotations

import asyncio
from typing import Self, Unpack

from kvxfer.engine.arguments import REFUSALS, Address, Seconds, deadline, refused
from kvxfer.engine.core import EngineCore
from kvxfer.engine.counter import Counter
from kvxfer.engine.options import EngineOptions
from kvxfer.engine.peer import Peer
from kvxfer.errors import DeadlineExceeded, EngineClosed, InvalidArgument, PeerLost
from kvxfer.own_thread import in_own_thread


class Engine(EngineCore):
    """One transfer engine: enter it with `async with`.

    cluster_key: shared by all engines that may connect to each other, at least 16 bytes.
    options: see EngineOptions; one that is left out has its default.

    Raises InvalidArgument, AddressInUse, PermissionDenied or FabricUnavailable.
    """

    def __init__(self, *, cluster_key: bytes | str, **options: Unpack[EngineOptions]) -> None:
        super().__init__(cluster_key, options, thread=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: dict[int, asyncio.Future[int]] = {}
        self._to_accept_changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        if self._closed:
            raise EngineClosed("this engine was closed; make a new one")
        if self._loop is not None:
            raise InvalidArgument("this engine was entered before; enter each engine once")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.native.event_fd, self._drain)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends everything with EngineClosed and stops the engine's thread. Idempotent."""
        if self._is_parents:
            return
        self._closed = True
        self._to_accept_changed.set()
        # Shielded: a cancelled close still closes, and other closers wait for the same end.
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        await in_own_thread(self.native.close)
        self._drain()
        if self._loop is not None:
            self._loop.remove_reader(self.native.event_fd)
        self._forget_all()

    async def connect(self, address: Address, timeout: Seconds = 2.0) -> Peer:
        """Connects, authenticates and returns the Peer; the existing one if that engine is already
        connected. An address with an id of zeros means any engine that listens there.

        Raises ConnectFailed, AuthenticationFailed, PeerRestarted or EngineClosed.
        """
        future: asyncio.Future[int] = self._entered().create_future()
        try:
            operation = self.native.connect(address, timeout)
        except REFUSALS as error:
            raise refused(error, Engine.connect, locals()) from None
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

    async def accept(self, timeout: Seconds | None = None) -> Peer:
        """Returns the next peer that connects to this engine. Each is returned once, in their
        order, also one that connected before the call, unless it is already lost. `peers` has all
        of them, and those that this engine has connected to.

        Raises DeadlineExceeded after `timeout` seconds, and EngineClosed.
        """
        self._entered()
        try:
            async with deadline(timeout):
                while not self._to_accept:
                    self._to_accept_changed.clear()
                    await self._to_accept_changed.wait()
                    self._entered()
        except TimeoutError:
            raise DeadlineExceeded(f"no peer has connected within {timeout} s") from None
        return self._to_accept.pop(next(iter(self._to_accept)))

    def _entered(self) -> asyncio.AbstractEventLoop:
        """Returns the loop that the engine belongs to."""
        if self._closed:
            raise EngineClosed("this engine was closed")
        if self._loop is None:
            raise InvalidArgument("enter the engine first: `async with engine:`")
        return self._loop

    def _peer_up(self, peer: Peer, *, accepted: bool) -> None:
        super()._peer_up(peer, accepted=accepted)
        self._to_accept_changed.set()

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
