"""Simulated processes, and the connections between them. Messages keep their order. Each side can
end alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvxfer.moe.membership import Membership
from verify.simulation.clock import Clock

from .exchange import Exchange

SILENCE: Final = 0.7
"""The seconds of silence after which a rank counts as lost."""


_NEVER: Final = float("inf")
WAIT: Final = -1.0
"""The value that a loop yields to wait for the next event. Else it yields the seconds for which it
computes."""


class Connection:
    """A connection of two ranks. Messages and data are not ordered relative to each other."""

    def __init__(self, network: Network, one: Process, other: Process, local: bool) -> None:
        self.network, self.sides, self.local = network, (one, other), local
        self.open = {one: True, other: True}
        self._lanes: dict[tuple[Process, str], float] = {}
        network.connections[one].append(self)
        network.connections[other].append(self)

    def other(self, side: Process) -> Process:
        return self.sides[1] if side is self.sides[0] else self.sides[0]

    def say(self, side: Process, message: bytes) -> None:
        to = self.other(side)
        if self.open[side]:
            self.carry(to, "said", lambda: to.meets(("said", self, message)))

    def write(self, side: Process, data: tuple[Any, ...]) -> None:
        """Writes data. On one host the other side gets it even if this side dies."""
        to = self.other(side)
        if not self.open[side]:
            return
        if self.local:
            to.lands(self, data)
            return

        def lands() -> None:
            if side.alive or self.network.random.random() < 0.5:
                to.lands(self, data)

        self.carry(to, "written", lands)

    def end(self, side: Process, *, silent: bool | None) -> None:
        """Ends the connection at this side. `silent` is True if the other side is silent, False if
        the connection broke, and None if the end is on purpose. The other side learns of the end
        unless it is cut off."""
        if not self.open[side]:
            return
        self.open[side] = False
        if silent is not None:
            side.meets(("lost", self, silent))
        to = self.other(side)
        self.carry(to, "said", lambda: self._closed(to))

    def _closed(self, side: Process) -> None:
        self.open[side] = False
        side.meets(("lost", self, False))

    def carry(self, to: Process, lane: str, arrives: Callable[[], None]) -> None:
        clock = self.network.clock
        at = clock.now + self.network.delay()
        at = max(at, self.network.cut_until(*self.sides) + 1e-4, self._lanes.get((to, lane), 0.0))
        self._lanes[to, lane] = at

        def arrived() -> None:
            until = self.network.cut_until(*self.sides)
            if until > clock.now:  # cut since it was sent
                clock.after(until - clock.now + 1e-4, arrived)
            elif self.open[to]:
                arrives()

        clock.after(at - clock.now, arrived, to)

    def watch(self, side: Process) -> None:
        """Watches the other side, which has fallen silent. If that lasts, this side gives it up."""
        since = self.network.clock.now

        def look() -> None:
            other = self.other(side)
            if not self.open[side] or other.silent_since(side) > since:
                return
            if side.resumed_at > since:  # this side's freeze does not count as silence
                self.watch(side)
            else:
                self.end(side, silent=True)

        patience = SILENCE + 0.1 * self.network.random.random()
        self.network.clock.after(patience, look, side)


class Network:
    """All connections, and the pairs of ranks that are cut off from each other."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.random = clock, rng
        self.connections: dict[Process, list[Connection]] = {}
        self._cuts: dict[frozenset[Process], tuple[float, float]] = {}
        self.slow = rng.random() < 0.3

    def delay(self) -> float:
        if self.slow and self.random.random() < 0.1:
            return self.random.uniform(0.001, 0.08)
        return self.random.uniform(1e-5, 4e-4)

    def cut(self, one: Process, other: Process, seconds: float) -> None:
        pair = frozenset((one, other))
        begun, until = self._cuts.get(pair, (0.0, 0.0))
        begun = begun if until > self.clock.now else self.clock.now
        self._cuts[pair] = (begun, max(until, self.clock.now + seconds))
        for connection in self.between(one, other):
            connection.watch(one)
            connection.watch(other)

    def cut_until(self, one: Process, other: Process) -> float:
        """Returns the time when the ranks' cut ends; 0 if they are not cut off from each other."""
        _, until = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return until if until > self.clock.now else 0.0

    def cut_since(self, one: Process, other: Process) -> float:
        begun, until = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return begun if until > self.clock.now else float("inf")

    def between(self, one: Process, other: Process) -> list[Connection]:
        return [each for each in self.connections[one] if other in each.sides]


class Process:
    """One process of a rank, from its start to its end. `main` is its loop. Events that lets() gets
    wait while it is frozen."""

    main: Iterator[float]

    def __init__(
        self, network: Network, rank: int, name: str, machine: Membership, *, newcomer: bool
    ) -> None:
        self._network, self.rank, self.name, self.machine = network, rank, name, machine
        self.newcomer = newcomer
        self.exchange = Exchange(rank, self._write, self.wake)
        self.connections: dict[int, Connection] = {}
        self.addresses: dict[int, Process] = {}
        self.alive, self.frozen_at = True, _NEVER
        self.resumed_at = 0.0
        self.host_gone = False
        self.refuses = 0
        """The number of its next steps that it cannot begin."""
        self.left_out: set[int] = set()
        """The steps that no rank runs."""
        self.arrived: list[tuple[Any, ...]] = []
        self._held: list[Callable[[], None]] = []
        self._waits = False
        network.connections[self] = []

    def lands(self, connection: Connection, data: tuple[Any, ...]) -> None:
        rank = connection.other(self).rank
        if self.connections.get(rank) is connection:
            self.exchange.lands(rank, data)

    def _write(self, rank: int, data: tuple[Any, ...]) -> None:
        if connection := self.connections.get(rank):
            connection.write(self, data)

    # --- acts of its host

    @property
    def runs(self) -> bool:
        return self.alive and self.frozen_at == _NEVER

    def lets(self, event: Callable[[], None]) -> bool:
        if self.alive and not self.runs:
            self._held.append(event)
        return self.runs

    def silent_since(self, peer: Process) -> float:
        """Returns the time since which the other rank gets nothing from this one."""
        since = self._network.clock.now if not self.host_gone else self.frozen_at
        if self.runs:
            since = _NEVER
        elif self.alive:
            since = self.frozen_at
        return min(since, self._network.cut_since(self, peer))

    def freeze(self) -> None:
        self.frozen_at = self._network.clock.now
        self._fall_silent()

    def resume(self) -> None:
        self.frozen_at, self.resumed_at = _NEVER, self._network.clock.now
        held, self._held = self._held, []
        for event in held:
            if self.lets(event):
                event()
        self.wake()

    def kill(self, *, host: bool = False) -> None:
        """Kills the process. With `host` its host dies too, so no connection is closed."""
        self.alive = False
        if host:
            self.host_gone = True
            self.frozen_at = self._network.clock.now
            self._fall_silent()
        else:
            for connection in self._network.connections[self]:
                connection.end(self, silent=None)

    def _fall_silent(self) -> None:
        for connection in self._network.connections[self]:
            connection.watch(connection.other(self))

    # --- events

    def start(self) -> None:
        self._go_on()

    def meets(self, event: tuple[Any, ...]) -> None:
        self.arrived.append(event)
        self.wake()

    def wake(self) -> None:
        if self._waits and self.runs:
            self._go_on()

    def _go_on(self) -> None:
        if not self.runs:
            return
        self._waits = False
        seconds = next(self.main, None)
        if seconds is None:
            return
        self._waits = seconds == WAIT
        if not self._waits:
            self._network.clock.after(seconds, self._go_on, self)
