"""Rounds, one after the other. Each has a group of processes, and some of these break."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Final

from kvxfer.clock import SYSTEM_CLOCK
from verify.chaos.link import Host

from .breakage import PHASES, Fault
from .member import Member, Setting, Shared

_FORKED: Final = multiprocessing.get_context("fork")
_HANG_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 0.02
_STEPS_WITHOUT_FAULT: Final = 60
_OF_MESSAGES: Final = ("sends", "hears")


@dataclass
class Round:
    """A group, its faults by rank, and the outcome."""

    setting: Setting
    faults: dict[int, Fault]
    rejoins: bool
    happened: set[int] = field(default_factory=set)
    seconds: dict[str, list[tuple[str, str, float]]] = field(
        default_factory=lambda: {"named": [], "without": []}
    )
    """An entry for each fault and survivor: act, phase, and the seconds until the survivor knew of
    the fault ("named"), or until its first step in a view without the rank ("without")."""
    broken: list[str] = field(default_factory=list)
    """Broken promises."""


def choose(fabric: str, rng: random.Random, hosts: tuple[Host, ...] = ()) -> Round:
    """Returns a random round. One of seven has no fault, and two of seven have two, if the group is
    large enough. `hosts` are for fabric "hosts"."""
    ranks = rng.randint(2, 8)
    setting = Setting(
        ranks,
        fabric,  # type: ignore[arg-type]
        layout=rng.choice(("experts", "tokens")),
        overlap=rng.random() < 0.4,
        copies=rng.choice((1, min(2, ranks))),
        seed=rng.getrandbits(32),
        hosts=hosts if fabric == "hosts" else (),
    )
    count = min(rng.choice((0, 1, 1, 1, 1, 2, 2)), ranks - 1)
    faults: dict[int, Fault] = {}
    for number, rank in enumerate(rng.sample(range(ranks), count)):
        # The agreement sends messages only once a rank is lost, so the first fault has no phase of
        # a message.
        phase = rng.choice(PHASES if number else PHASES[:-3])
        message = phase.split()[0] in _OF_MESSAGES
        faults[rank] = Fault(
            rng.choice(("kill", "freeze")),
            phase,
            rng.randint(1, ranks) if message else rng.randint(3, 8),
            rng.random(),
        )
    return Round(setting, faults, rejoins=rng.random() < 0.3)


def run(round_: Round, *, prepare: Callable[[], None] = lambda: None) -> None:
    """Runs a round. Each process calls `prepare` first."""
    driver = _Driver(round_, prepare)
    try:
        driver.run()
    except _NotKept as error:
        round_.broken.append(str(error))
    finally:
        driver.close()


class _NotKept(Exception):
    pass


class _Driver:
    """The processes of one round."""

    def __init__(self, round_: Round, prepare: Callable[[], None]) -> None:
        self._round, self._prepare = round_, prepare
        self._setting = round_.setting
        self._shared = Shared(_FORKED, self._setting.ranks)
        self._processes: dict[int, BaseProcess] = {}
        self._connections: dict[int, Connection] = {}
        self._addresses: dict[int, str] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._ended: dict[int, str] = {}
        self._gone: set[int] = set()

    def run(self) -> None:
        ranks = range(self._setting.ranks)
        for rank in ranks:
            self._start(rank, self._round.faults.get(rank))
        self._until(lambda: len(self._addresses) == len(ranks), "all ranks have started")
        for rank in ranks:
            self._connections[rank].send([self._addresses[each] for each in ranks])
        if self._round.faults:
            self._faults()
        else:
            self._until(lambda: self._shared.steps.value >= _STEPS_WITHOUT_FAULT, "steps are run")
        self._shared.asked.value = 1
        self._until(
            lambda: self._ended.keys() | self._gone >= self._processes.keys(), "all have ended"
        )
        for rank, code in self._ended.items():
            if code and rank not in self._round.happened:
                raise _NotKept(f"rank {rank}, which had no fault, ended with {code}")

    def _start(self, rank: int, fault: Fault | None, member: str | None = None) -> None:
        ours, theirs = _FORKED.Pipe()
        victims = frozenset(self._round.faults)
        made = Member(self._setting, rank, fault, victims, self._shared, theirs)
        process = _FORKED.Process(target=self._run, args=(made, member))
        process.start()
        theirs.close()
        self._processes[rank], self._connections[rank] = process, ours
        self._gone.discard(rank)

    def _run(self, member: Member, address: str | None) -> None:
        try:
            self._prepare()
            member.run(address)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _faults(self) -> None:
        """Waits until all survivors are in a view without the ranks that broke."""
        faults, shared = self._round.faults, self._shared
        survivors = {*range(self._setting.ranks)} - {*faults}
        agree = {rank for rank, each in faults.items() if each.phase.split()[0] in _OF_MESSAGES}
        first = {*faults} - agree

        def agreed() -> bool:
            broke = {rank for rank in faults if shared.broke_at[rank]}
            views = {self._members.get(rank) for rank in survivors}
            (view,) = views if len(views) == 1 else (None,)
            return first <= broke and view is not None and not broke & {*view}

        what = "all survivors are in a view without the broken ranks"
        self._until(agreed, what)
        shared.armed.value = 0
        SYSTEM_CLOCK.sleep(_SETTLE_SECONDS)  # for ranks that are about to break
        self._until(agreed, what)
        self._round.happened = {rank for rank in faults if shared.broke_at[rank]}
        for rank in sorted(self._round.happened):
            if faults[rank].act == "freeze":
                self._resume(rank)
        rejoining = sorted(self._round.happened) if self._round.rejoins else []
        for rank in rejoining:
            self._processes[rank].kill()
            self._processes[rank].join()
            self._forget(rank)
            leader = min(survivors)
            self._start(rank, None, self._addresses[leader])
            whole = {*survivors, rank} | ({*self._members.get(leader, ())} & {*rejoining})
            self._until(
                lambda whole=whole: all(  # type: ignore[misc]
                    {*self._members.get(each, ())} >= whole for each in whole
                ),
                f"rank {rank} has joined again",
            )

    def _resume(self, rank: int) -> None:
        """Resumes a frozen rank. The rank has to be told that it is excluded."""
        process = self._processes[rank]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGCONT)
        self._until(lambda: rank in self._ended, f"rank {rank} ended after it was resumed")
        code = self._ended[rank]
        if code != "rank-excluded":
            raise _NotKept(f"rank {rank} was frozen and excluded, and ended with {code!r}")

    def _forget(self, rank: int) -> None:
        self._connections.pop(rank).close()
        for known in (self._members, self._ended):
            known.pop(rank, None)  # type: ignore[attr-defined]
        self._gone.discard(rank)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Receives the ranks' reports until the condition is true."""
        give_up = SYSTEM_CLOCK.monotonic() + _HANG_SECONDS
        while not condition():
            left = give_up - SYSTEM_CLOCK.monotonic()
            live = {self._connections[r]: r for r in self._connections if r not in self._gone}
            ready = wait(list(live), max(0.0, min(left, 0.2)))
            if left <= 0:
                raise _NotKept(f"not within {_HANG_SECONDS:g} s: {what}; {self._state()}")
            for connection in ready:
                assert isinstance(connection, Connection)
                self._take(live[connection], connection)

    def _state(self) -> str:
        return f"views {self._members}, ended {self._ended}, gone {sorted(self._gone)}"

    def _take(self, rank: int, connection: Connection) -> None:
        try:
            kind, said, more = connection.recv()
        except (EOFError, ConnectionError):
            self._gone.add(rank)
            fault = self._round.faults.get(rank)
            killed = fault is not None and fault.act == "kill" and self._shared.broke_at[rank]
            if rank not in self._ended and not killed:
                raise _NotKept(f"rank {rank} has ended without a report") from None
            return
        match kind:
            case "address":
                self._addresses[rank] = said
            case "members":
                self._members[rank], self._addresses[rank] = said, more
            case "named" | "without":
                fault = self._round.faults[said]
                if rank not in self._round.faults:
                    self._round.seconds[kind].append((fault.act, fault.phase, more))
            case "ended":
                self._ended[rank] = said
                if said == "wrong":
                    raise _NotKept(more)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        for connection in self._connections.values():
            connection.close()
