"""A connection between two simulated engines: its messages and writes, and its end."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.engine.native import native as compiled
from kvxfer.kv.messages import decode

if TYPE_CHECKING:
    from .native import NativeEngine
    from .network import Network
    from .writes import PostedOperation


class Placer(enum.Enum):
    """The part of the receiver that places arrived data."""

    ENGINE = "engine"
    NIC = "NIC"
    GPU = "GPU"


PEER_TIMEOUT = 0.7
HEARTBEAT = 0.1


def _gist(data: bytes) -> str:
    message = decode(data)
    return f"{type(message).__name__} {getattr(message, 'transfer_id', '')}"


class End:
    """One side's half: its engine's state of the peer, and its operations to the peer."""

    def __init__(self, link: Link, index: int, native: NativeEngine) -> None:
        self.link = link
        self.index = index
        self.native = native
        self.peer_id = native.new_id()
        self.state = "opening"
        self.waiters: list[int] = []
        self._unheard = 0
        self.operations: dict[int, PostedOperation] = {}
        self.revoked: set[int] = set()
        """The immediates that the other side has revoked."""
        self.paths = 0
        """The number of resets of the paths that this end knows. Writes that were sent on earlier
        paths do not land."""
        self.opened = 0
        """The last reset that both ends have seen. The paths are open if it equals `paths`."""
        native.ends[self.peer_id] = self

    @property
    def other(self) -> End:
        return self.link.ends[1 - self.index]

    @property
    def name(self) -> str:
        return f"{self.native.process.name}->{self.other.native.process.name}"

    def come_up(self) -> None:
        self.state = "up"
        native, other = self.native, self.other.native
        native.complete(
            "peer_up", peer=self.peer_id, text=other.process.name, data=other.engine_id.encode(),
            fabric=self.link.fabric,
        )  # fmt: skip
        for waiter in self.waiters:
            native.complete("connect", waiter, self.peer_id)
        self.waiters.clear()

    def send(self, data: bytes) -> None:
        """Sends a message. Messages keep their order."""
        network = self.native.network
        if self._unheard >= network.max_messages:
            network.count("messages held back")
            raise compiled.Error("backpressure", f"{self._unheard} messages wait")
        self._unheard += 1

        def arrive() -> None:
            self._unheard -= 1
            self.other.receive(data)

        self.link.carry(self.index, arrive, ordered=True)

    def receive(self, data: bytes) -> None:
        if self.state == "up":
            self.native.network.note("heard", lambda: f"{self.name} {_gist(data)}")
            self.native.complete("message", peer=self.peer_id, data=data)

    def lose(self, code: str, text: str) -> None:
        """Loses the peer: first the fence, then the end of all operations, then the report."""
        if self.state == "lost":
            return
        was_up, self.state = self.state == "up", "lost"
        native = self.native
        native.network.note("lost", lambda: f"{self.name}: {code}, {text}")
        del native.ends[self.peer_id]
        native.counters.forget_writer(self)
        for operation in list(self.operations.values()):
            operation.abandon(code, text)
        for waiter in self.waiters:
            native.complete("connect", waiter, code=code, text=text)
        if was_up:
            native.complete("peer_down", peer=self.peer_id, code=code, text=text)
        self.link.carry(
            self.index,
            lambda: self.other.lose("peer-lost", "it closed the connection"),
            ordered=True,
        )

    def reset_paths(self) -> None:
        """Closes the paths, as a fence. The other end learns of it later; writes of this end wait
        for its answer."""
        self.paths += 1
        reset = self.paths
        self.link.carry(self.index, lambda: self.other.paths_were_reset(reset))

    def paths_were_reset(self, reset: int) -> None:
        if self.state == "lost":
            return
        self.paths = max(self.paths, reset)
        self.paths_are_open(reset)
        self.link.carry(self.index, lambda: self.other.paths_are_open(reset))

    def paths_are_open(self, reset: int) -> None:
        if self.state == "lost" or reset != self.paths:
            return  # closed again: another answer follows
        self.opened = reset
        for operation in list(self.operations.values()):
            operation.requeue()

    def watch(self) -> None:
        """Starts a new watch over the other side: it may just have fallen silent, or this side has
        just woken up."""
        last_heard = self.native.network.rng.uniform(0, HEARTBEAT)
        self._look_after(PEER_TIMEOUT - last_heard)

    def _look_after(self, seconds: float) -> None:
        self.native.network.clock.after(seconds, self._look, self.native.process)

    def _look(self) -> None:
        since = self.link.silent_since(1 - self.index)
        if self.state == "lost" or since is None:
            return
        silent = self.native.network.clock.now - max(since, self.native.process.woke_at)
        if silent >= PEER_TIMEOUT - HEARTBEAT:
            self.lose("peer-timeout", f"no heartbeat for {silent:.2f} s")
        else:
            self._look_after(PEER_TIMEOUT - silent)


class Link:
    """Both ends, and the faults of the connection.

    A NIC places bytes even while the process is stopped, until its paths are reset. A GPU places
    them until the copy that the receiving engine has started is complete.
    """

    def __init__(self, network: Network, dialer: NativeEngine, acceptor: NativeEngine) -> None:
        self.network = network
        self.placer = network.placer
        self.fabric = "verbs" if self.places_by_nic else "tcp"
        self._cut_at: list[float | None] = [None, None]
        self._held_until = 0.0
        self.disturbed_at = 0.0
        """The time until which its messages are lost or late."""
        self._last = [0.0, 0.0]
        self.ends = (End(self, 0, dialer), End(self, 1, acceptor))

    @property
    def places_by_nic(self) -> bool:
        return self.placer is Placer.NIC

    @property
    def places_by_gpu(self) -> bool:
        return self.placer is Placer.GPU

    @property
    def alive(self) -> bool:
        return all(end.state == "up" and end.native.process.alive for end in self.ends)

    def cut(self, direction: int) -> None:
        """Drops everything that this end sends from now on."""
        if self._cut_at[direction] is None:
            self._cut_at[direction] = self.disturbed_at = self.network.clock.now
            self.ends[1 - direction].watch()

    def hold(self, seconds: float) -> None:
        """Delays everything that is sent in the next `seconds` until their end."""
        self._held_until = self.disturbed_at = self.network.clock.now + seconds

    def silent_since(self, direction: int) -> float | None:
        """Returns the time since which no heartbeat of this end arrives; None if they arrive."""
        process = self.ends[direction].native.process
        times = (self._cut_at[direction], process.stopped_at, process.died_at)
        return min((at for at in times if at is not None), default=None)

    def carry(
        self,
        direction: int,
        arrive: Callable[[], None],
        *,
        ordered: bool = False,
        not_before: float = 0.0,
        needs_process: bool = True,
    ) -> float:
        """Calls `arrive` at the other end after a delay, unless the way is cut before. Returns the
        time of arrival."""
        if self._cut_at[direction] is not None:
            return 0.0
        clock = self.network.clock
        at = max(max(clock.now, self._held_until) + self.network.latency(), not_before)
        if ordered:
            at = self._last[direction] = max(at, self._last[direction])

        def arrived() -> None:
            if self._cut_at[direction] is None:
                arrive()

        process = self.ends[1 - direction].native.process if needs_process else None
        clock.after(at - clock.now, arrived, process)
        return at
