"""What is said to one peer, in order, and what its engine has no room for yet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvxfer.clock import Clock
from kvxfer.errors import Backpressure, EngineError, KvxferError, PeerError, PeerTimeout

if TYPE_CHECKING:
    from kvxfer.engine import Peer

PATIENCE_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.005
# Between two tries no more than this counts: a process that was stopped may not hold it against the
# peer, who had no chance.
_MOST_SECONDS: Final = 0.1


class Outbox:
    """send(): any thread. Everything else: the loop that it was made on.

    A message that the engine has not taken after PATIENCE_SECONDS is never sent: `give_up` is
    called, and has to end the connection. Its loss tells the peer what the message would have.
    """

    def __init__(self, peer: Peer, give_up: Callable[[KvxferError], object], clock: Clock) -> None:
        self._peer = peer
        self._give_up = give_up
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: deque[tuple[float, bytes]] = deque()  # until when by _waited, and what
        self._waited = 0.0
        self._tried_at = 0.0

    def send(self, data: bytes) -> None:
        """Sends, or keeps until there is room. Raises PeerLost and MessageTooLarge."""
        with self._lock:
            if not self._waiting:
                with contextlib.suppress(Backpressure):
                    self._peer.send(data)
                    return
                self._tried_at = self._clock.monotonic()
                self._loop.call_soon_threadsafe(self._retry_later)
            self._waiting.append((self._waited + PATIENCE_SECONDS, data))

    def close(self) -> None:
        """Nobody sends any more. What was kept is not sent: the connection ends, if it has not."""
        with self._lock:
            unsaid = bool(self._waiting)
            self._waiting.clear()
        if unsaid:
            with contextlib.suppress(EngineError):
                self._peer.fence()

    def _retry_later(self) -> None:
        self._loop.call_later(RETRY_SECONDS, self._retry)

    def _retry(self) -> None:
        error: KvxferError
        with self._lock:
            now = self._clock.monotonic()
            self._waited += min(now - self._tried_at, _MOST_SECONDS)
            self._tried_at = now
            try:
                while self._waiting:
                    self._peer.send(self._waiting[0][1])
                    self._waiting.popleft()
                return
            except Backpressure as full:
                if self._waited < self._waiting[0][0]:
                    self._retry_later()
                    return
                error = PeerTimeout(
                    f"peer {self._peer.engine_id} took no message for {PATIENCE_SECONDS:g} s: "
                    f"{full}"
                )
            except PeerError:
                self._waiting.clear()  # its loss is reported
                return
            except EngineError as other:
                error = other
            self._waiting.clear()
        self._give_up(error)
