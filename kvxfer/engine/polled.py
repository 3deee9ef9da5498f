"""The engine of programs that poll: without a thread and without asyncio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Self, Unpack

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.engine.arguments import (
    REFUSALS,
    Address,
    Count,
    Seconds,
    refused,
    require_callable,
    require_seconds,
)
from kvxfer.engine.core import EngineCore
from kvxfer.engine.counter import Counter
from kvxfer.engine.options import EngineOptions
from kvxfer.engine.peer import Peer
from kvxfer.errors import DeadlineExceeded, EngineClosed, PeerLost, ProtocolError, StaleCounter

# The time in native code between two checks of the clock and of Ctrl-C.
_TURN_SECONDS: Final = 0.01


class PolledEngine(EngineCore):
    """A transfer engine that its caller drives: enter it with `with`.

    It is for a loop that has a core to itself and counts microseconds; other programs use `Engine`.
    The engine works in poll() and in methods that wait. It belongs to the thread that made it:
    everything is called there. If it does not poll for the `peer_timeout` of its peers (0.7 s),
    they consider it lost. Everything that is awaited, `Counter.on_arrival()` and `Peer.receive()`
    are for asyncio programs; messages go to `handler`.

    cluster_key, options: as for Engine, without `cpus`. Raises as Engine does.
    """

    def __init__(
        self,
        *,
        cluster_key: bytes | str,
        clock: Clock = SYSTEM_CLOCK,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(cluster_key, options, thread=False)
        self._clock = clock
        self._connected: dict[int, int | Exception] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything with EngineClosed. Idempotent."""
        if self._is_parents:
            return
        self._closed = True
        self.native.close()
        self._drain()
        self._forget_all()

    def poll(self) -> bool:
        """Does the pending work, and never sleeps. Returns whether anything moved."""
        moved = self.native.poll()
        self._drain()
        return moved

    def connect(self, address: Address, timeout: Seconds = 2.0) -> Peer:
        """Connects as Engine.connect() does, polling meanwhile."""
        if self._closed:
            raise EngineClosed("this engine was closed")
        try:
            operation = self.native.connect(address, timeout)
        except REFUSALS as error:
            raise refused(error, PolledEngine.connect, locals()) from None
        while operation not in self._connected:
            self.poll()
        ended = self._connected.pop(operation)
        if isinstance(ended, Exception):
            raise ended
        peer = self._peers.get(ended)
        if peer is None:
            raise PeerLost(f"the peer at {address} was lost right after connecting")
        return peer

    def accept(self, timeout: Seconds) -> Peer:
        """Accepts as Engine.accept() does, polling meanwhile."""
        self._poll_until(
            lambda: bool(self._to_accept), timeout, "no peer has connected within {} s"
        )
        return self._to_accept.pop(next(iter(self._to_accept)))

    def poll_until(self, done: Callable[[], bool], timeout: Seconds) -> None:
        """Polls until `done()` is true, for example `operation.done`. Raises DeadlineExceeded after
        `timeout` seconds, and EngineClosed."""
        require_callable("done", done)
        self._poll_until(done, timeout, "nothing to show for {} s of polling")

    def _poll_until(self, done: Callable[[], bool], timeout: Seconds, late: str) -> None:
        require_seconds(timeout)
        deadline = self._clock.monotonic() + timeout
        while not done():
            if self._closed:
                raise EngineClosed("this engine was closed")
            if self._clock.monotonic() > deadline:
                raise DeadlineExceeded(late.format(timeout))
            self.poll()

    def poll_counter(self, counter: Counter, total: Count, timeout: Seconds) -> None:
        """Polls in native code, faster than poll_until(), until exactly `total` immediates have
        arrived. Raises as Counter.wait() does."""
        require_seconds(timeout)
        deadline = self._clock.monotonic() + timeout
        while (value := self._polled(counter, total)) < total:
            if self._closed:
                raise EngineClosed("this engine was closed")
            if self._counters.get(counter.imm) is not counter:
                raise StaleCounter(f"counter {counter.imm} was released")
            if self._clock.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"counter {counter.imm} stands at {value} of {total} immediates "
                    f"after {timeout} s"
                )
        if value > total:
            raise ProtocolError(
                f"counter {counter.imm} stands at {value} immediates, but {total} were waited for; "
                "wait for the sum of `immediates` of all operations that carry it"
            )

    def _polled(self, counter: Counter, total: Count) -> int:
        try:
            return self.native.poll_counter(counter.imm, total, _TURN_SECONDS)
        except REFUSALS as error:
            raise refused(error, PolledEngine.poll_counter, locals()) from None

    def _connect_ended(self, ident: int, peer_id: int, error: Exception | None) -> None:
        self._connected[ident] = peer_id if error is None else error

    def _end_wait(self, counter: Counter, error: Exception) -> None:
        pass  # the waiter polls, and notices
