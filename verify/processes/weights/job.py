"""The processes of a training job: `python -m verify.processes.weights.job NAME JSON`.

One process loads torch and forks the ranks. It reads commands as JSON lines, such as `{"id": 1,
"do": "step", "ranks": [0, 1]}` (by default for all ranks). It passes each command to the ranks, and
gives one answer with the answers of all. `training.py` is its driver.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

# Modules that fully_shard() would otherwise load in each rank.
import torch._dynamo  # noqa: F401

from verify.processes.commands import report
from verify.processes.weights.trainer_rank import Job, serve

_QUIT_SECONDS: Final = 20.0


class Ranks:
    """The forked processes, and the commands that they have not answered yet."""

    def __init__(self, job: Job) -> None:
        forked = multiprocessing.get_context("fork")
        pairs = [forked.Pipe() for _ in range(job.world_size)]
        self._ours: list[Connection | None] = [ours for ours, _ in pairs]
        self._processes: list[ForkProcess] = []
        self._open: dict[int, dict[int, Any]] = {}
        """The answers of the ranks to each command, by its id; None until a rank answers."""
        self._ready = 0
        for rank, (_, theirs) in enumerate(pairs):
            others = [each for pair in pairs for each in pair if each is not theirs]
            process = forked.Process(target=_run, args=(job, rank, theirs, others))
            process.start()
            self._processes.append(process)
        for _, theirs in pairs:
            theirs.close()

    @property
    def pids(self) -> list[int | None]:
        return [each.pid for each in self._processes]

    @property
    def connections(self) -> list[Connection]:
        return [each for each in self._ours if each is not None]

    def tell(self, command: dict[str, Any]) -> None:
        """Passes a command to its ranks. For ranks that have ended, answers with an error."""
        asked = command.pop("ranks", range(len(self._ours)))
        ident = command.get("id")
        if ident is not None:
            self._open[ident] = dict.fromkeys(asked)
        for rank in asked:
            connection = self._ours[rank]
            try:
                if connection is None:
                    raise BrokenPipeError
                connection.send(command)
            except BrokenPipeError:
                self._gone(rank)

    def hear(self, connection: Connection) -> None:
        """Handles one event or answer of a rank, or its end."""
        rank = self._ours.index(connection)
        try:
            event = connection.recv()
        except (EOFError, ConnectionResetError):
            self._ours[rank] = None
            connection.close()
            self._gone(rank)
            report("ended", rank=rank)
            return
        if event.get("event") == "ready":
            self._ready += 1
            if self._ready == len(self._ours):
                report("ready", pids=self.pids)
        elif "event" in event:
            report(**event)
        else:
            self._answered(event.pop("id"), rank, event)

    def join(self) -> int:
        for each in self._processes:
            each.join(_QUIT_SECONDS)
        return max(1 if each.exitcode is None else abs(each.exitcode) for each in self._processes)

    def _gone(self, rank: int) -> None:
        answer = {"rank": rank, "error": f"rank {rank} has ended", "code": "ended"}
        for ident in [one for one, answers in self._open.items() if rank in answers]:
            self._answered(ident, rank, answer)

    def _answered(self, ident: int | None, rank: int, answer: dict[str, Any]) -> None:
        if ident is None or ident not in self._open or self._open[ident][rank] is not None:
            return
        self._open[ident][rank] = answer
        if None not in self._open[ident].values():
            report(id=ident, ranks=list(self._open.pop(ident).values()))


def _run(job: Job, rank: int, driver: Connection, others: list[Connection]) -> None:
    for each in others:  # else this rank would not see the end of its driver
        each.close()
    serve(job, rank, driver)


def main(options: dict[str, Any]) -> int:
    ranks = Ranks(Job(**{**options, "store": Path(options["store"])}))
    stdin, read = sys.stdin.fileno(), b""
    while ranks.connections:
        for found in wait([stdin, *ranks.connections]):
            if isinstance(found, Connection):
                ranks.hear(found)
                continue
            data = os.read(stdin, 1 << 16)
            if not data:  # the driver has ended
                os._exit(1)
            *lines, read = (read + data).split(b"\n")
            for line in lines:
                ranks.tell(json.loads(line))
    return ranks.join()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2])))
