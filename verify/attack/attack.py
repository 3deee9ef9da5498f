"""One attack on one pair of workers, and what must be unchanged after it."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from .pair import Pair, Victim

Fabric: TypeAlias = Literal["tcp", "local"]
Metric: TypeAlias = tuple[str, tuple[str, ...]]

HONEST_SHARE: Final = 0.8
MOST_MEMORY: Final = 96 << 20  # growth over the memory before the attack
_SETTLE = 20.0


@dataclass(frozen=True, slots=True)
class Tried:
    """The numbers of attempts and of refusals. `errors` are the names of the errors that an honest
    side reported."""

    attempts: int
    refused: int
    errors: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack. `metric` has to count each attempt: it names the refused thing and the codes of
    the refusal. It is None if another worker refuses, or if the attempt has no effect and is not
    counted."""

    name: str
    victim: Literal["prefill", "decode"]
    metric: Metric | None
    run: Callable[[Pair, random.Random], Tried]
    fabrics: tuple[Fabric, ...] = ("tcp", "local")


@dataclass(frozen=True, slots=True)
class Flood:
    """An attack that goes on while honest transfers are measured. `start` gives its tally.

    `elsewhere` does the same work without a victim while honest transfers are measured alone, so
    that the attacker's processor time on this machine does not count as a loss of the victim.
    """

    name: str
    victim: Literal["prefill", "decode"]
    metric: Metric
    start: Callable[[Pair, random.Random], AbstractContextManager[Tally]]
    elsewhere: Callable[[], AbstractContextManager[None]] = nullcontext
    fabrics: tuple[Fabric, ...] = ("tcp", "local")


@dataclass(slots=True)
class Tally:
    """The attempts and refusals of a flood so far."""

    attempts: int = 0
    refused: int = 0


@dataclass(slots=True)
class Row:
    """A line of the table."""

    name: str
    fabric: str
    attempts: int = 0
    refused: int = 0
    metric: str = ""
    counted: int = 0
    changed: int = 0
    honest_share: float | None = None
    memory_growth: int = 0
    fds_growth: int = 0
    threads_growth: int = 0
    problems: list[str] = field(default_factory=list)


def run(attack: Attack, pair: Pair, rng: random.Random) -> Row:
    victim: Victim = getattr(pair, attack.victim)
    before = victim.state()
    row = Row(attack.name, pair.fabric)
    tried = attack.run(pair, rng)
    row.attempts, row.refused = tried.attempts, tried.refused
    if tried.refused < tried.attempts:
        answers = ", ".join(sorted(tried.errors))
        row.problems.append(
            f"{tried.attempts - tried.refused} attempts were not refused; answers: {answers}"
        )
    _settle(row, victim, before, attack.metric, tried.attempts)
    _compare(row, pair, victim, before)
    return row


def run_flood(
    flood: Flood,
    pair: Pair,
    rng: random.Random,
    *,
    rounds: int = 4,
    most: int = 16,
    transfers: int = 8,
    least_share: float = HONEST_SHARE,
) -> Row:
    """Measures honest transfers alone and under attack, in turn, for `rounds` rounds. If they show
    a slowdown, continues for up to `most` rounds: other work may have caused it."""
    victim: Victim = getattr(pair, flood.victim)
    before = victim.state()
    row = Row(flood.name, pair.fabric)
    pair.transfer(transfers)
    alone: list[float] = []
    under: list[float] = []
    peak = before["anonymous"]
    for turn in range(most):
        if turn >= rounds and _share(alone, under) >= least_share:
            break
        with flood.start(pair, rng) as tally:
            time.sleep(0.2)
            under += pair.transfer(transfers)
            during = victim.state()
        peak = max(peak, during["anonymous"])
        row.fds_growth = max(row.fds_growth, during["fds"] - before["fds"])
        row.threads_growth = max(row.threads_growth, during["threads"] - before["threads"])
        row.attempts += tally.attempts
        row.refused += tally.refused
        with flood.elsewhere():
            time.sleep(0.2)
            alone += pair.transfer(transfers)
    row.honest_share = _share(alone, under)
    if row.honest_share < least_share:
        row.problems.append(f"honest transfers keep {row.honest_share:.0%}")
    if row.refused < row.attempts:
        row.problems.append(f"{row.attempts - row.refused} attempts were not refused")
    _settle(row, victim, before, flood.metric, row.attempts)
    _compare(row, pair, victim, before)
    row.memory_growth = max(row.memory_growth, peak - before["anonymous"])
    if row.memory_growth > MOST_MEMORY:
        row.problems.append(f"memory grew by {row.memory_growth >> 20} MiB")
    return row


def _share(alone: list[float], under: list[float]) -> float:
    """Returns the share of their speed that honest transfers keep, from the seconds of each."""
    return statistics.median(alone) / statistics.median(under)


def counted(state: dict[str, Any], metric: Metric) -> int:
    """Returns the metric's value, summed over its codes, from the victim's Prometheus text."""
    what, codes = metric
    total = 0.0
    for code in codes:
        line = f'kvxfer_refused_total{{code="{code}",what="{what}"}} '
        total += sum(
            float(each.removeprefix(line))
            for each in state["metrics"].splitlines()
            if each.startswith(line)
        )
    return int(total)


def _settle(
    row: Row, victim: Victim, before: dict[str, Any], metric: Metric | None, least: int
) -> None:
    """Waits until the metric has counted the attempts and the connections are closed again."""
    give_up = time.monotonic() + _SETTLE
    while True:
        now = victim.state()
        row.counted = counted(now, metric) - counted(before, metric) if metric else 0
        done = (not metric or row.counted >= least) and now["fds"] <= before["fds"]
        if done or time.monotonic() > give_up:
            break
        time.sleep(0.05)
    row.metric = f"{metric[0]}: {', '.join(metric[1])}" if metric else "-"
    if metric and row.counted < least:
        row.problems.append(f"{row.counted} of {least} were counted in {row.metric}")
    if now["fds"] > before["fds"]:
        row.problems.append(f"{now['fds'] - before['fds']} file descriptors stay open")


def _compare(row: Row, pair: Pair, victim: Victim, before: dict[str, Any]) -> None:
    """Checks the victim's bytes, memory, threads and free blocks, and that an honest transfer still
    succeeds."""
    row.changed = pair.changed()
    if row.changed:
        row.problems.append(f"{row.changed} bytes were changed")
    pair.transfer()
    after = victim.state()
    row.memory_growth = max(row.memory_growth, after["anonymous"] - before["anonymous"])
    if row.memory_growth > MOST_MEMORY:
        row.problems.append(f"memory grew by {row.memory_growth >> 20} MiB")
    if after["threads"] > before["threads"]:
        row.problems.append(f"{after['threads'] - before['threads']} threads stay")
    if after["free"] != before["free"]:
        row.problems.append(f"{before['free'] - after['free']} blocks are not free again")


class Repeated(threading.Thread):
    """A thread that calls `step` at most `per_second` times a second, at the lowest priority: on a
    real network the attacker and the victim do not share a processor."""

    def __init__(self, step: Callable[[], None], per_second: float) -> None:
        super().__init__(daemon=True)
        self._step = step
        self._pause = 1 / per_second
        self._stopped = threading.Event()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        due = time.monotonic()
        while not self._stopped.is_set():
            self._step()
            due = max(due + self._pause, time.monotonic() - 0.05)
            self._stopped.wait(max(0.0, due - time.monotonic()))

    def stop(self) -> None:
        self._stopped.set()
        self.join()
