"""The faults of the ranks of a simulated group."""

from __future__ import annotations

from typing import Any, Final

from kvxfer.moe.view_messages import Flush, View

from . import group as simulated
from .defects import NONE, Defects
from .group import Group, Outcome
from .network import Process

FAULTS: Final = (
    "kill",
    "host lost",
    "short freeze",
    "freeze",
    "many freeze",
    "false suspicion",
    "reset",
    "short cut",
    "cut",
    "partition",
    "sender of views dies",
    "sender of views freezes",
    "sender of flushes dies",
    "refusal",
    "refusals",
)


def simulate(seed: int, defects: Defects = NONE, *, trace: bool = False) -> Outcome:
    return simulated.simulate(seed, plan, defects, trace=trace)


def plan(group: Group) -> float:
    """Plans the faults of a group. Returns the time after the last one."""
    return _Fate(group).plan()


class _Fate:
    def __init__(self, group: Group) -> None:
        self._group, self._random = group, group.random
        self._last = group.clock.now + 0.1
        self._freezes: list[tuple[float, float]] = []

    def plan(self) -> float:
        count = self._random.choice((0, 1, 1, 2, 2, 3, 4, 6))
        at = 0.0
        for _ in range(count):
            # Faults come together, shortly after one another, or while a loss is being detected.
            at += self._random.choice((0.0, 0.0, 0.001, 0.01, 0.72, self._random.random()))
            self._one(min(at, 3.0))
        if self._random.random() < 0.6:
            self._restart_all()
        return self._last

    def _at(self, seconds: float, act: Any, *, lasts: float = 0.0) -> None:
        self._last = max(self._last, self._group.clock.now + seconds + lasts + 0.001)
        self._group.clock.after(seconds, act)

    def _one(self, at: float) -> None:
        group = self._group
        fault = self._random.choice(FAULTS)
        rank = self._random.randrange(group.size)
        other = self._random.choice([each for each in range(group.size) if each != rank])
        group.count(fault)
        match fault:
            case "kill" | "host lost":
                self._at(at, lambda: self._kill(rank, host=fault == "host lost"))
            case "short freeze" | "freeze":
                long = fault == "freeze"
                seconds = self._random.uniform(*((0.75, 3.5) if long else (0.05, 0.7)))
                self._freezes.append((at, at + seconds))
                self._at(at, lambda: self._freeze(rank, seconds), lasts=seconds)
            case "many freeze":
                seconds = self._random.uniform(0.75, 3.5)
                ranks = self._random.sample(
                    range(group.size), self._random.randint(1, group.size - 1)
                )
                self._freezes.append((at, at + seconds))
                self._at(at, lambda: [self._freeze(each, seconds) for each in ranks], lasts=seconds)
            case "false suspicion" | "reset":
                silent = fault == "false suspicion"
                self._at(at, lambda: self._end(rank, other, silent=silent))
            case "short cut" | "cut":
                long = fault == "cut"
                seconds = self._random.uniform(*((0.75, 3.0) if long else (0.01, 0.7)))
                self._at(at, lambda: self._cut([rank], [other], seconds), lasts=seconds)
            case "partition":
                ranks = self._random.sample(range(group.size), group.size)
                size = self._random.randint(1, group.size - 1)
                seconds = self._random.uniform(0.75, 3.0)
                one, rest = ranks[:size], ranks[size:]
                self._at(at, lambda: self._cut(one, rest, seconds), lasts=seconds)
            case "refusal":
                self._at(at, lambda: self._refuse(rank))
            case "refusals":
                ranks = self._random.sample(range(group.size), self._random.randint(1, group.size))
                times = self._random.randint(1, 4)
                self._at(at, lambda: [self._refuse(each, times) for each in ranks])
            case _:
                self._arm(fault, at)
        self._weigh()

    def _weigh(self) -> None:
        """Decides whether two halves may both continue: some ranks were cut off, or were frozen at
        another time than others."""
        counts = self._group.counts
        cut = counts["cut"] + counts["partition"] + counts["short cut"]
        waves = len(self._freezes) + counts["sender of views freezes"] > 1
        safe = self._group.min_ranks > self._group.size // 2
        self._group.one_group = safe or not (cut or waves)

    # --- faults

    def _touch(self, *ranks: int) -> None:
        self._group.touched |= {*ranks}

    def _kill(self, rank: int, *, host: bool) -> None:
        process = self._group.ranks[rank]
        self._touch(rank)
        if process.runs:
            self._group.trace(process, "is killed")
            process.kill(host=host)

    def _refuse(self, rank: int, times: int = 1) -> None:
        """Makes a rank refuse its next steps. The others must not lose it for that."""
        self._group.ranks[rank].refuses = times

    def _freeze(self, rank: int, seconds: float) -> None:
        process = self._group.ranks[rank]
        self._touch(rank)
        if not process.runs:
            return
        self._group.trace(process, "freezes")
        process.freeze()
        self._at(seconds, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.alive:
            self._group.trace(process, "wakes up")
            process.resume()

    def _end(self, rank: int, other: int, *, silent: bool) -> None:
        one, two = (self._group.ranks[each] for each in (rank, other))
        self._touch(rank, other)
        connection = one.connections.get(other)
        if one.runs and two.runs and connection is not None and two in connection.sides:
            self._group.trace(one, f"the connection to {two.name} breaks")
            connection.end(one, silent=silent)
            if not silent and self._random.random() < 0.5:
                connection.end(two, silent=False)

    def _cut(self, ranks: list[int], others: list[int], seconds: float) -> None:
        self._touch(*ranks, *others)
        for rank in ranks:
            for other in others:
                one, two = (self._group.ranks[each] for each in (rank, other))
                self._group.trace(one, f"is cut off from {two.name}")
                self._group.network.cut(one, two, seconds)

    def _arm(self, fault: str, at: float) -> None:
        """Kills or freezes the sender of a random message of a kind."""
        group = self._group
        kind = Flush if "flushes" in fault else View
        left = self._random.randint(1, 2 * group.size)
        seconds = self._random.uniform(0.75, 3.0)

        def sent(process: Process, message: object) -> None:
            nonlocal left
            if not isinstance(message, kind) or group.clock.now > begin + 3.0:
                return
            left -= 1
            if left == 0:
                group.count(f"{fault}, done")
                if "freezes" in fault:
                    self._freeze(process.rank, seconds)
                else:
                    self._kill(process.rank, host=False)

        begin = group.clock.now + at
        before = group.of_sender

        def both(process: Process, message: object) -> None:
            if before is not None:
                before(process, message)  # type: ignore[arg-type]
            sent(process, message)

        group.of_sender = both
        self._last = max(self._last, begin + 3.0 + (seconds if "freezes" in fault else 0.0))

    # --- newcomers

    def _restart_all(self) -> None:
        """Plans restarts of ended ranks, for some time."""
        group = self._group
        group.count("restarts")
        until = self._last + self._random.uniform(0.0, 2.0)

        def look() -> None:
            for rank in range(group.size):
                if not group.ranks[rank].alive and self._random.random() < 0.3:
                    group.restart(rank)
                    self._hit_newcomer(rank)
                    at, refusing = (
                        self._random.uniform(0.0, 0.5),
                        self._random.randrange(group.size),
                    )
                    self._at(at, lambda one=refusing: self._refuse(one, 8))
            if group.clock.now < until:
                group.clock.after(0.2, look)

        group.clock.after(0.3, look)
        self._last = until + 1.5

    def _hit_newcomer(self, rank: int) -> None:
        """Plans faults of some newcomers, while they are admitted or soon after."""
        at = self._random.uniform(0.0, 1.0)
        chance = self._random.random()
        other = self._random.choice([each for each in range(self._group.size) if each != rank])
        if chance < 0.1:
            self._group.count("newcomer killed")
            self._at(at, lambda: self._kill(rank, host=False))
        elif chance < 0.3:
            self._group.count("newcomer's connection reset")
            self._at(at, lambda: self._end(rank, other, silent=self._random.random() < 0.5))
