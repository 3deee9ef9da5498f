"""An engine with its own thread for programs that call and wait."""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import TypeAlias, Unpack

from kvxfer.engine.arguments import REFUSALS, Address, Seconds, refused
from kvxfer.engine.core import EngineCore, NativeCompletion
from kvxfer.engine.counter import Counter
from kvxfer.engine.options import EngineOptions
from kvxfer.engine.peer import Peer
from kvxfer.errors import PeerLost

Connected: TypeAlias = Callable[[Peer | Exception], object]


class SynchronousEngine(EngineCore):
    """A transfer engine whose completions its caller takes, on the thread that made it.

    completions: the function that returns them: the native engine's, or another that drains it.
    Raises as Engine does.
    """

    def __init__(self, *, cluster_key: bytes | str, **options: Unpack[EngineOptions]) -> None:
        super().__init__(cluster_key, options, thread=True)
        self.completions: Callable[[], Sequence[NativeCompletion]] = self.native.drain
        self._connecting: dict[int, Connected] = {}
        self._readable = select.poll()
        self._readable.register(self.native.event_fd, select.POLLIN)

    def close(self) -> None:
        """Ends everything with EngineClosed and stops the engine's thread. Idempotent."""
        if self._closed or self._is_parents:
            return
        self._closed = True
        self.native.close()
        self.take()
        self._forget_all()

    def take(self) -> bool:
        """Passes completions to the peers and the handler. Returns whether there were any."""
        completions = self.completions()
        self._take(completions)
        return bool(completions)

    def wait(self, seconds: float) -> None:
        """Waits for completions for at most `seconds`, and takes them."""
        if not self.take() and seconds > 0:
            self._readable.poll(seconds * 1000)
            self.take()

    def connect(self, address: Address, timeout: Seconds, then: Connected) -> None:
        """Begins to connect; take() calls `then` with the peer, or with the error."""
        try:
            self._connecting[self.native.connect(address, timeout)] = then
        except REFUSALS as error:
            raise refused(error, SynchronousEngine.connect, locals()) from None

    def _connect_ended(self, ident: int, peer_id: int, error: Exception | None) -> None:
        then = self._connecting.pop(ident)
        peer = self._peers.get(peer_id)
        then(error or peer or PeerLost("the peer was lost right after connecting"))

    def _end_wait(self, counter: Counter, error: Exception) -> None:
        pass  # nothing waits for single counters
