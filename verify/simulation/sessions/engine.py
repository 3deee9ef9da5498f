"""The state of a simulated engine: its ends of connections, and its ImmCounters.

Each end knows what its engine knows of the peer. ImmCounters know the writes that count, their
grants, and revocation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvxfer.engine.native import native as compiled
from kvxfer.kv.messages import decode

from .contents import Array
from .process import Process
from .wire import Wire
from .world import World

EVENT_FD = 3
PEER_TIMEOUT = 0.7
HEARTBEAT = 0.1
ASK_SECONDS = 0.150
_SLOT_BITS = 16
_SLOTS = 3


class Operation(Protocol):
    """A submission to a peer, as its end and the counters see it."""

    imm: int

    @property
    def unread(self) -> Sequence[object]:
        """The groups of writes that were not read yet."""

    @property
    def under_way(self) -> bool: ...
    def fail(self, code: str, text: str) -> None: ...
    def abandon(self, code: str, text: str) -> None: ...
    def requeue(self) -> None: ...


class EngineState:
    """An engine's process, peers, counters and completions."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.engine_id = process.incarnation
        self.ends: dict[int, End] = {}
        self.counters = Counters(self)
        self._ids = itertools.count(1)
        self._completions: list[tuple[Any, ...]] = []

    def new_id(self) -> int:
        return next(self._ids)

    def new_name(self) -> bytes:
        return f"{self.engine_id}/{self.new_id()}".encode()

    def complete(
        self,
        kind: str,
        ident: int = 0,
        peer: int = 0,
        code: str = "ok",
        text: str = "",
        data: bytes = b"",
        fabric: str = "",
    ) -> None:
        if not self._completions:
            self.process.loop.readable(EVENT_FD)
        self._completions.append((kind, ident, peer, code, text, data, fabric, 0, []))

    def drain(self) -> list[tuple[Any, ...]]:
        completions, self._completions = self._completions, []
        return completions

    def close(self) -> None:
        for end in list(self.ends.values()):
            end.lose("engine-closed", "this engine was closed")


def _gist(data: bytes) -> str:
    message = decode(data)
    return f"{type(message).__name__} {getattr(message, 'transfer_id', '')}"


class End:
    """One side's half: its engine's state of the peer, and its operations to the peer."""

    def __init__(self, link: Link, index: int, native: EngineState) -> None:
        self.link = link
        self.index = index
        self.native = native
        self.peer_id = native.new_id()
        self.state = "opening"
        self.waiters: list[int] = []
        self._unheard = 0
        self.operations: dict[int, Operation] = {}
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
        world = self.native.world
        if self._unheard >= world.max_messages:
            world.count("messages held back")
            raise compiled.Error("backpressure", f"{self._unheard} messages wait")
        self._unheard += 1

        def arrive() -> None:
            self._unheard -= 1
            self.other.receive(data)

        self.link.carry(self.index, arrive, ordered=True)

    def receive(self, data: bytes) -> None:
        if self.state == "up":
            self.native.world.note("heard", lambda: f"{self.name} {_gist(data)}")
            self.native.complete("message", peer=self.peer_id, data=data)

    def lose(self, code: str, text: str) -> None:
        """Loses the peer: first the fence, then the end of all operations, then the report."""
        if self.state == "lost":
            return
        was_up, self.state = self.state == "up", "lost"
        native = self.native
        native.world.note("lost", lambda: f"{self.name}: {code}, {text}")
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
        last_heard = self.native.world.rng.uniform(0, HEARTBEAT)
        self._look_after(PEER_TIMEOUT - last_heard)

    def _look_after(self, seconds: float) -> None:
        self.native.world.clock.after(seconds, self._look, self.native.process)

    def _look(self) -> None:
        since = self.link.silent_since(1 - self.index)
        if self.state == "lost" or since is None:
            return
        silent = self.native.world.clock.now - max(since, self.native.process.woke_at)
        if silent >= PEER_TIMEOUT - HEARTBEAT:
            self.lose("peer-timeout", f"no heartbeat for {silent:.2f} s")
        else:
            self._look_after(PEER_TIMEOUT - silent)


class Link(Wire):
    """A connection: the wire between two processes, and both ends."""

    def __init__(self, world: World, dialer: EngineState, acceptor: EngineState) -> None:
        super().__init__(world, (dialer.process, acceptor.process))
        self.ends = (End(self, 0, dialer), End(self, 1, acceptor))

    @property
    def alive(self) -> bool:
        return all(end.state == "up" and end.native.process.alive for end in self.ends)

    def cut(self, direction: int) -> bool:
        new = super().cut(direction)
        if new:
            self.ends[1 - direction].watch()
        return new


@dataclass(eq=False, slots=True)
class _Counter:
    writer: End | None
    live: bool = True
    closed: bool = False
    """True once no write for it can land."""
    count: int = 0
    copying: int = 0
    """The number of a GPU's copies that are under way."""
    total: int | None = None
    exact: bool = True
    grants: list[bytes] = field(default_factory=list)


class Counters:
    """One engine's counters, with the promises of the C++ ImmCounters, grants and revocations."""

    def __init__(self, native: EngineState) -> None:
        self._native = native
        self._counters: dict[int, _Counter] = {}
        self._allocated = 0
        self._granted: dict[bytes, tuple[Array, int]] = {}
        self._answered: dict[tuple[End, int], Any] = {}
        """The answers to send to peers that revoked an immediate, once no write with it is under
        way."""

    @property
    def live(self) -> int:
        return sum(not counter.closed for counter in self._counters.values())

    def allocate(self, writer: int | None) -> int:
        """Allocates a counter. A slot that is reused gets a new generation."""
        self._allocated += 1
        slot, generation = self._allocated % _SLOTS, 1 + self._allocated // _SLOTS
        imm = generation << _SLOT_BITS | slot
        self._counters[imm] = _Counter(self._native.ends.get(writer or 0))
        return imm

    def grant(self, imm: int, ranges: Any) -> list[bytes]:
        descriptors = []
        for region, offset, nbytes in ranges:
            name = self._native.new_name()
            self._granted[name] = (region.data[offset : offset + nbytes], imm)
            self._counters[imm].grants.append(name)
            descriptors.append(name)
        return descriptors

    def target(self, end: End, imm: int, grant: bytes) -> tuple[Array | None, str]:
        """Returns the memory that a write may go to, or why it may not."""
        target, for_imm = self._granted.get(grant, (None, 0))
        counter = self._counters.get(imm)
        if self._native.world.defects.lands_late and target is not None:
            return target, ""
        if counter is None or counter.closed or counter.writer is not end:
            return None, f"counter {imm:#x} is not live"
        if for_imm != imm:
            return None, "the region is not known, or granted to another immediate"
        return target, ""

    def add(self, imm: int) -> None:
        counter = self._counters.get(imm)
        if counter is not None and counter.live:
            counter.count += 1
            self._report(imm, counter)

    def value(self, imm: int) -> int:
        counter = self._counters.get(imm)
        return counter.count if counter is not None and counter.live else 0

    def expect(self, imm: int, total: int, at_least: bool) -> None:
        counter = self._counters.get(imm)
        if counter is None or not counter.live:
            raise compiled.Error("stale-counter", f"counter {imm:#x} is not live")
        counter.total, counter.exact = total, not at_least
        self._report(imm, counter)

    def release(self, imm: int, *, wait: bool = False) -> bool:
        """Releases a counter. Returns whether no write can land any more. If that is not known yet,
        a completion "released" follows.

        With `wait` the real engine blocks until then; never use it in an event loop.
        """
        counter = self._counters.get(imm)
        if counter is None or not counter.live:
            return True
        counter.live = False
        end = counter.writer
        complete = counter.total is not None and counter.count == counter.total
        world = self._native.world
        if counter.copying and not world.defects.forgets_copies:
            world.count("copies waited for")
            return False
        if complete or end is None or end.state == "lost" or not end.link.places_by_nic:
            self._close(imm, counter)
            return True
        world.require(
            not wait, f"{self._native.process.name} blocks until {end.name} stops writing"
        )
        world.count("asked to revoke")
        end.link.carry(end.index, lambda: end.other.native.counters.spare(end.other, imm))
        world.clock.after(ASK_SECONDS, lambda: self._reset(imm), self._native.process)
        return False

    def copy_begins(self, imm: int) -> None:
        if counter := self._counters.get(imm):
            counter.copying += 1

    def copy_ended(self, imm: int) -> None:
        if counter := self._counters.get(imm):
            counter.copying -= 1
            if not counter.live and not counter.copying:
                self.spared(imm)

    def spare(self, end: End, imm: int) -> None:
        """Handles a peer's revocation of an immediate. Answers once no write uses it."""
        if end.state == "lost":
            return
        end.revoked.add(imm)
        for operation in list(end.operations.values()):
            if operation.imm == imm:
                operation.fail("stale-counter", f"counter {imm:#x} is revoked")
        receiver = end.other

        def answer() -> None:
            end.link.carry(end.index, lambda: receiver.native.counters.spared(imm))

        self._answered[end, imm] = answer
        self.one_ended(end, imm)

    def one_ended(self, end: End, imm: int) -> None:
        """Answers a revocation if the last write with the immediate has ended."""
        answer = self._answered.get((end, imm))
        if answer is None or any(
            operation.imm == imm and operation.under_way for operation in end.operations.values()
        ):
            return
        del self._answered[end, imm]
        answer()

    def spared(self, imm: int) -> None:
        """Closes a counter: its writer has answered, or can no longer write."""
        counter = self._counters.get(imm)
        if counter is not None and not counter.closed:
            self._close(imm, counter)
            self._native.complete("released", imm)

    def forget_writer(self, end: End) -> None:
        """Closes the released counters of a fenced peer."""
        for imm, counter in list(self._counters.items()):
            if counter.writer is end and not counter.live and not counter.copying:
                self.spared(imm)
        for key in [key for key in self._answered if key[0] is end]:
            del self._answered[key]

    def _reset(self, imm: int) -> None:
        counter = self._counters.get(imm)
        if counter is None or counter.closed or counter.writer is None:
            return
        world, name = self._native.world, counter.writer.name
        world.note("paths reset", lambda: name)
        world.count("paths reset")
        self._close(imm, counter)
        counter.writer.reset_paths()
        self._native.complete("released", imm)

    def _close(self, imm: int, counter: _Counter) -> None:
        counter.live, counter.closed = False, True
        if not self._native.world.defects.lands_late:
            for name in counter.grants:
                del self._granted[name]
            del self._counters[imm]

    def _report(self, imm: int, counter: _Counter) -> None:
        if counter.total is None or counter.count < counter.total:
            return
        if counter.exact and counter.count > counter.total:
            text = f"{counter.count} writes arrived, {counter.total} were announced"
            self._native.complete("counter", imm, code="protocol-error", text=text)
        else:
            self._native.complete("counter", imm)
