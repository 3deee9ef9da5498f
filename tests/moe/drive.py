"""Runs a scenario: a process for each of its ranks, forked so that torch is loaded once.

`python -m tests.moe.drive SCENARIO…` runs scenarios, each as JSON, one after the other. It exits
with 1 if a rank has failed; the output has the rank's traceback.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final

from tests.moe.group_rank import GroupRank, Stop
from tests.moe.scenario import Scenario

_FORKED: Final = multiprocessing.get_context("fork")


class Failed(Exception):
    """Raised after a rank has failed and printed its traceback."""


class Drive:
    """The ranks of one scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._asked, self._step = _FORKED.RawValue("q", 0), _FORKED.RawValue("q", -1)
        self._ranks: dict[int, tuple[BaseProcess, Connection]] = {}
        self._ranks_of: dict[Connection, int] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._ended: dict[int, str] = {}
        self._addresses: dict[int, str] = {}

    def run(self) -> None:
        scenario = self.scenario
        everyone = tuple(range(scenario.ranks))
        try:
            for rank in everyone:
                self._start(rank)
            self._until(lambda: len(self._addresses) == scenario.ranks)
            for rank in everyone:
                self._ranks[rank][1].send([self._addresses[each] for each in everyone])
            if scenario.victim >= 0:
                self._fault()
            self._asked.value = 1
            self._until(lambda: self._ended.keys() == self._ranks.keys())
            for rank, (process, _) in self._ranks.items():
                process.join()
                if process.exitcode != 0:
                    raise Failed(f"rank {rank}: exit code {process.exitcode}")
        finally:
            for process, _ in self._ranks.values():
                process.kill()

    def _start(self, rank: int, member: str | None = None) -> None:
        ours, theirs = _FORKED.Pipe()
        stop = Stop(self._asked, self._step)
        process = _FORKED.Process(target=_rank, args=(self.scenario, rank, theirs, stop, member))
        process.start()
        theirs.close()
        self._ranks[rank] = (process, ours)
        self._ranks_of[ours] = rank

    def _fault(self) -> None:
        """Waits until the group is as it has to be after the fault."""
        scenario, victim = self.scenario, self.scenario.victim
        rest = tuple(rank for rank in range(scenario.ranks) if rank != victim)
        if len(rest) < scenario.min_ranks:
            self._until(lambda: {*rest} <= self._ended.keys())
            assert {self._ended[rank] for rank in rest} == {"moe-group-lost"}, self._ended
            self._forget(victim)
            return
        self._until(lambda: all(self._members.get(rank) == rest for rank in rest))
        process, _ = self._ranks[victim]
        if scenario.fault == "freeze":
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
            self._until(lambda: victim in self._ended)
            assert self._ended.pop(victim) == "rank-excluded"
        self._forget(victim)
        if scenario.rejoin:
            self._start(victim, self._addresses[rest[0]])
            whole = (*range(scenario.ranks),)
            self._until(lambda: all(self._members.get(rank) == whole for rank in whole))

    def _forget(self, rank: int) -> None:
        process, connection = self._ranks.pop(rank)
        process.kill()
        process.join()
        self._ranks_of.pop(connection, None)
        self._members.pop(rank, None)
        self._ended.pop(rank, None)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Handles messages of the ranks until the condition is true."""
        while not condition():
            for connection in wait([*self._ranks_of]):
                assert isinstance(connection, Connection)
                rank = self._ranks_of[connection]
                try:
                    kind, said, more = connection.recv()
                except EOFError:
                    del self._ranks_of[connection]
                    killed = rank == self.scenario.victim and self.scenario.fault == "kill"
                    if rank not in self._ended and not killed:
                        raise Failed(f"rank {rank}: no word") from None
                    continue
                match kind:
                    case "address":
                        self._addresses[rank] = said
                    case "view":
                        self._members[rank], self._addresses[rank] = said, more
                    case "ended":
                        self._ended[rank] = said


def _rank(
    scenario: Scenario, rank: int, driver: Connection, stop: Stop, member: str | None
) -> None:
    try:
        GroupRank(scenario, rank, driver, stop).run(member)
    except BaseException:
        print(f"rank {rank} of {scenario}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)


def main(scenarios: list[dict[str, Any]]) -> None:
    import torch  # noqa: F401

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")  # logs views
    for number, each in enumerate(scenarios):
        try:
            Drive(Scenario(**{**each, "refused_steps": tuple(each["refused_steps"])})).run()
        except Failed as error:
            sys.exit(f"scenario {number} has failed: {error}")
        print(f"scenario {number} of {len(scenarios)} has passed", flush=True)


if __name__ == "__main__":
    main([json.loads(each) for each in sys.argv[1:]])
