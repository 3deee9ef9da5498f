"""Connections between simulated ranks. Messages keep their order. Each side can end alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from verify.simulation.clock import Clock

if TYPE_CHECKING:
    from .rank import Rank

SILENCE: Final = 0.7
"""The seconds of silence after which a rank counts as lost."""


class Connection:
    """A connection of two ranks. Messages and data are not ordered relative to each other."""

    def __init__(self, network: Network, one: Rank, other: Rank, local: bool) -> None:
        self.network, self.sides, self.local = network, (one, other), local
        self.open = {one: True, other: True}
        self._lanes: dict[tuple[Rank, str], float] = {}
        network.connections[one].append(self)
        network.connections[other].append(self)

    def other(self, side: Rank) -> Rank:
        return self.sides[1] if side is self.sides[0] else self.sides[0]

    def say(self, side: Rank, message: bytes) -> None:
        to = self.other(side)
        if self.open[side]:
            self._carry(to, "said", lambda: to.meets(("said", self, message)))

    def write(self, side: Rank, data: tuple[Any, ...]) -> None:
        """Writes data. On one host the other side gets it even if this side dies."""
        to = self.other(side)
        if not self.open[side]:
            return
        if self.local:
            to.exchange.lands(self, data)
            return

        def lands() -> None:
            if side.alive or self.network.random.random() < 0.5:
                to.exchange.lands(self, data)

        self._carry(to, "written", lands)

    def end(self, side: Rank, *, silent: bool | None) -> None:
        """Ends the connection at this side. `silent` is True if the other side is silent, False if
        the connection broke, and None if the end is on purpose. The other side learns of the end
        unless it is cut off."""
        if not self.open[side]:
            return
        self.open[side] = False
        if silent is not None:
            side.meets(("lost", self, silent))
        to = self.other(side)
        self._carry(to, "said", lambda: self._closed(to))

    def _closed(self, side: Rank) -> None:
        self.open[side] = False
        side.meets(("lost", self, False))

    def _carry(self, to: Rank, lane: str, arrives: Callable[[], None]) -> None:
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

        clock.after(at - clock.now, arrived, to)  # type: ignore[arg-type]

    def watch(self, side: Rank) -> None:
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
        self.network.clock.after(patience, look, side)  # type: ignore[arg-type]


class Network:
    """All connections, and the pairs of ranks that are cut off from each other."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.random = clock, rng
        self.connections: dict[Rank, list[Connection]] = {}
        self._cuts: dict[frozenset[Rank], tuple[float, float]] = {}
        self.slow = rng.random() < 0.3

    def delay(self) -> float:
        if self.slow and self.random.random() < 0.1:
            return self.random.uniform(0.001, 0.08)
        return self.random.uniform(1e-5, 4e-4)

    def cut(self, one: Rank, other: Rank, seconds: float) -> None:
        pair = frozenset((one, other))
        begun, until = self._cuts.get(pair, (0.0, 0.0))
        begun = begun if until > self.clock.now else self.clock.now
        self._cuts[pair] = (begun, max(until, self.clock.now + seconds))
        for connection in self.between(one, other):
            connection.watch(one)
            connection.watch(other)

    def cut_until(self, one: Rank, other: Rank) -> float:
        """Returns the time when the ranks' cut ends; 0 if they are not cut off from each other."""
        _, until = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return until if until > self.clock.now else 0.0

    def cut_since(self, one: Rank, other: Rank) -> float:
        begun, until = self._cuts.get(frozenset((one, other)), (0.0, 0.0))
        return begun if until > self.clock.now else float("inf")

    def between(self, one: Rank, other: Rank) -> list[Connection]:
        return [each for each in self.connections[one] if other in each.sides]
