"""The peers of one member, and the messages between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import (
    AuthenticationFailed,
    DeadlineExceeded,
    EngineError,
    InvalidArgument,
    KvxferError,
    PeerRestarted,
    ProtocolError,
)
from kvxfer.weights.transfer.messages import Inbox, Message, encode

if TYPE_CHECKING:
    from kvxfer.engine import Engine, Peer

logger = logging.getLogger("kvxfer.weights")

JOIN_SECONDS: Final = 60.0
LASTING: Final = (AuthenticationFailed, InvalidArgument, PeerRestarted, ProtocolError)
"""Errors of connecting that another attempt would not change."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0


class Links:
    """The handler of an engine that is used only for weight updates. Event loop only."""

    def __init__(
        self,
        engine: Engine,
        on_message: Callable[[Peer, Message], None],
        on_lost: Callable[[Peer, EngineError], None],
    ) -> None:
        self.engine = engine
        self._on_message = on_message
        self._on_lost = on_lost
        self._inboxes: dict[int, Inbox] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        engine.handler = self

    def send(self, peer: Peer | None, message: Message) -> bool:
        """Sends a message. Returns False without a live peer; `on_lost` reports a loss anyway."""
        if peer is None or not peer.alive:
            return False
        try:
            for data in encode(message):
                peer.send(data)
        except KvxferError as error:
            logger.warning("%r takes no message: %s", peer.name, error)
            peer.close()
            return False
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task, which close() cancels."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a task of a weight update failed", exc_info=error)

    async def close(self) -> None:
        """Cancels all spawned tasks, and waits for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.engine.handler is self:
            self.engine.handler = None

    async def join(self, coordinator: str, greet: Callable[[Peer], None], timeout: float) -> None:
        """Starts keep_connected() as a task, and waits for its first greeting. Raises
        DeadlineExceeded, and LASTING errors at once; the task then ends."""
        heard: asyncio.Queue[KvxferError | None] = asyncio.Queue()
        last: KvxferError | None = None
        dialing = self.spawn(self.keep_connected(coordinator, greet, heard.put_nowait))
        try:
            async with asyncio.timeout(timeout):
                while (last := await heard.get()) is not None:
                    if isinstance(last, LASTING):
                        raise last
        except TimeoutError:
            dialing.cancel()
            why = "" if last is None else f": {last}"
            raise DeadlineExceeded(
                f"no coordinator of weight updates answers at {coordinator} within {timeout:g} s"
                f"{why}"
            ) from last
        except BaseException:
            dialing.cancel()
            raise

    async def keep_connected(
        self,
        address: str,
        greet: Callable[[Peer], None],
        tried: Callable[[KvxferError | None], None] = lambda _: None,
    ) -> None:
        """Dials the address until cancelled, again after each loss, and greets the peer each time.
        `tried` gets the error of each attempt; None if the peer was greeted."""
        pause = _FIRST_PAUSE
        said = ""
        while True:
            try:
                peer = await self.engine.connect(address)
            except KvxferError as error:
                tried(error)
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s; trying again", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause, said = _FIRST_PAUSE, ""
            lost = asyncio.Event()
            peer.on_lost(lambda _, lost=lost: lost.set())  # type: ignore[misc]
            greet(peer)
            tried(None)
            await lost.wait()
            await asyncio.sleep(pause)

    # --- the engine's handler

    def peer_up(self, peer: Peer) -> None:
        self._inboxes[peer.id] = Inbox()

    def message(self, peer: Peer, data: bytes) -> None:
        inbox = self._inboxes.setdefault(peer.id, Inbox())
        try:
            message = inbox.take(data, peer.name)
            if message is not None:
                self._on_message(peer, message)
        except ProtocolError as error:
            logger.warning("%s", error)
            peer.close()

    def peer_lost(self, peer: Peer, error: EngineError) -> None:
        self._inboxes.pop(peer.id, None)
        self._on_lost(peer, error)
