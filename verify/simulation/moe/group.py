"""A simulated group: its ranks, their faults, and its end."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .defects import NONE, Defects
from .network import Process
from .oracle import Oracle
from .rank import Rank
from .world import Violation, World

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


class Group(World):
    """A group whose whole life follows from its seed."""

    def __init__(self, seed: int, defects: Defects, *, traced: bool) -> None:
        super().__init__(seed, defects, traced=traced)
        self.oracle = Oracle(self)
        self.ranks = [Rank(self, self.oracle, rank, newcomer=False) for rank in range(self.size)]
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
            self.clock.after(self.random.uniform(0, 0.01), rank.start, rank)

    def restart(self, rank: int) -> None:
        """Starts a process in the place of one that has died."""
        self.starts[rank] += 1
        process = Rank(self, self.oracle, rank, newcomer=True)
        self.ranks[rank] = process
        self.all.append(process)
        self.trace(process, "starts")
        process.start()

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
        self.digest.update(f"{self.clock.now} {self.clock.events}".encode())
        return Outcome(violation, self.counts, self.digest.hexdigest(), self.lines)

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

    def _waiting(self, goal: dict[Process, int]) -> list[Process]:
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
