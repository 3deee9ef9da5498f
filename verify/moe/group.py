"""A simulated group: its ranks, their faults, and its end."""

from __future__ import annotations

import collections
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvxfer.moe.view_messages import Answer, Ask, Flush, View
from verify.simulation.clock import Clock

from .defects import NONE, Defects
from .joining import Joining
from .network import SILENCE, Connection, Network
from .oracle import Oracle, Violation
from .rank import ORDERS, Rank

_PAUSE_SECONDS: Final = 0.05
_DIAL_SECONDS: Final = 0.8
_MOST_SECONDS: Final = 25.0
"""The time after the last fault for every rank to continue, or to learn that it is excluded."""
_MORE_STEPS: Final = 3
"""The number of steps that each rank must run after the last fault."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one seed."""

    violation: str
    counts: collections.Counter[str]
    fingerprint: str
    trace: list[str]


class Group:
    """A group whose whole life follows from its seed."""

    def __init__(self, seed: int, defects: Defects, *, traced: bool) -> None:
        self.random = random.Random(seed)
        self.defects = defects
        self.clock = Clock()
        self.network = Network(self.clock, self.random)
        self.oracle = Oracle(self)
        self.joining = Joining(self)
        self.counts: collections.Counter[str] = collections.Counter()
        self.traced, self.lines = traced, list[str]()
        self._digest = hashlib.sha256()
        self.size = self.random.choice((2, 3, 4, 4, 5, 6, 7, 8))
        self.order = self.random.choice(list(ORDERS))
        most = self.size // 2 + 1
        self.min_ranks = self.random.choice((1, 1, most))
        self.compute_most = self.random.choice((0.05, 0.1, 0.3))
        self.touched: set[int] = set()
        """The ranks that had a fault."""
        self.of_sender: Callable[[Rank, View | Flush], None] | None = None
        self.starts = [0] * self.size
        self.ranks = [Rank(self, rank, newcomer=False) for rank in range(self.size)]
        self.first = [*self.ranks]
        self.all = [*self.ranks]
        self._connect()

    def _connect(self) -> None:
        hosts = self.random.choice((1, 2, self.size))
        for one in self.ranks:
            one.addresses = {other.rank: other for other in self.ranks if other is not one}
            for other in self.ranks[one.rank + 1 :]:
                local = one.rank % hosts == other.rank % hosts
                self.connect(one, other, local=local)
        for rank in self.ranks:
            self.oracle.adopts_first(rank)
            self.clock.after(self.random.uniform(0, 0.01), rank.start, rank)  # type: ignore[arg-type]

    def connect(self, one: Rank, other: Rank, *, local: bool) -> None:
        connection = Connection(self.network, one, other, local)
        for side in (one, other):
            peer = connection.other(side)
            side.connections[peer.rank] = connection
            side.addresses[peer.rank] = peer
            side.exchange.set_up(peer.rank)

    def restart(self, rank: int) -> None:
        """Starts a process in the place of one that has died."""
        self.starts[rank] += 1
        process = Rank(self, rank, newcomer=True)
        self.ranks[rank] = process
        self.all.append(process)
        self.trace(process, "starts")
        process.start()

    # --- calls of ranks

    def compute_seconds(self) -> float:
        if self.random.random() < 0.01:
            return self.random.uniform(0.2, 1.2)
        return self.random.uniform(0.0005, self.compute_most)

    def count(self, what: str, times: int = 1) -> None:
        self.counts[what] += times

    def trace(self, rank: Rank, text: str) -> None:
        line = f"{self.clock.now:.6f} {rank.name}: {text}"
        self._digest.update(line.encode())
        if self.traced:
            self.lines.append(line)

    def fate_of_sender(self, rank: Rank, message: Any) -> None:
        if self.of_sender is not None:
            self.of_sender(rank, message)

    def ask(self, asker: Rank, target: Rank, ask: Ask, *, pause: bool) -> None:
        """Asks a rank over a new connection. The answer, or None, is an event of `asker`."""
        self.count("asked")
        done = False

        def answered(answer: Answer | None) -> None:
            nonlocal done
            if not done:
                done = True
                event = ("answer", target.rank, ask, answer)
                self.clock.after(self.network.delay(), lambda: asker.meets(event), asker)  # type: ignore[arg-type]

        def unreachable() -> bool:
            return not target.runs or bool(self.network.cut_until(asker, target))

        def dial() -> None:
            if not target.alive and not target.host_gone:
                answered(None)
            elif unreachable():
                self.clock.after(_DIAL_SECONDS, redial)
            else:
                target.meets(("asked", ask, lambda answer: reply(answer)))
                watch(False)

        def redial() -> None:
            if unreachable():
                answered(None)
            else:
                dial()

        def reply(answer: Answer) -> None:
            until = self.network.cut_until(asker, target)
            if until:
                self.clock.after(until - self.clock.now + 1e-4, lambda: reply(answer))
            else:
                answered(answer)

        def watch(before: bool) -> None:
            silent = unreachable()
            if not target.alive or (silent and before):
                answered(None)
            if not done:
                self.clock.after(SILENCE, lambda: watch(silent))

        self.clock.after(
            self.network.delay() + (_PAUSE_SECONDS if pause else 0.0),
            dial,
            asker,  # type: ignore[arg-type]
        )

    # --- the run

    def run(self, faults: Callable[[Group], float]) -> Outcome:
        """Runs the group. `faults` plans the faults, and returns the time after the last one."""
        violation = ""
        try:
            quiet = faults(self)
            self._until(quiet)
            self._settle()
            self.oracle.require_survivors()
            if self.one_group:
                self.oracle.require_one_group()
        except Violation as broken:
            violation = str(broken)
        except Exception as error:
            if not self.defects.patches:
                raise
            violation = f"{type(error).__name__}: {error}"
        self._digest.update(f"{self.clock.now} {self.clock.events}".encode())
        return Outcome(violation, self.counts, self._digest.hexdigest(), self.lines)

    one_group = True
    """True if the faults permit only one half of the group to continue."""

    def _until(self, at: float) -> None:
        while self.clock.due_at() <= at:
            self._happen()
        self.clock.now = max(self.clock.now, at)

    def _happen(self) -> None:
        due = self.clock.due_at()
        if due == float("inf"):
            raise Violation("no event is left")
        self.clock.now = max(self.clock.now, due)
        self.clock.happen()

    def _settle(self) -> None:
        """Runs until each living rank continues, or has been told to stop."""
        end = self.clock.now + _MOST_SECONDS
        goal = {rank: self.oracle.steps[rank] + _MORE_STEPS for rank in self.all}
        while waiting := self._waiting(goal):
            if self.clock.now > end or self.clock.due_at() == float("inf"):
                raise Violation(
                    "these ranks wait forever: "
                    + "; ".join(f"{rank.name} in {rank.machine.view}" for rank in waiting)
                )
            self._until(self.clock.now + 0.1)

    def _waiting(self, goal: dict[Rank, int]) -> list[Rank]:
        live = [rank for rank in self.ranks if rank.alive]
        for rank in live:  # later newcomers count from now on
            goal.setdefault(rank, self.oracle.steps[rank] + _MORE_STEPS)
        members = [rank for rank in live if not rank.newcomer or rank.machine.view is not None]
        if not members:
            return []  # there is no group to join
        return [rank for rank in live if self.oracle.steps[rank] < goal[rank]]


def simulate(
    seed: int,
    faults: Callable[[Group], float],
    defects: Defects = NONE,
    *,
    trace: bool = False,
) -> Outcome:
    with defects.installed():
        return Group(seed, defects, traced=trace).run(faults)
