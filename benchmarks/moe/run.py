"""Runs the benchmark's processes, and makes the report."""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from benchmarks.moe import mpi
from benchmarks.moe.cases import CASES, Case, Routes
from benchmarks.moe.failure import RankFailed
from benchmarks.moe.figures import MoeReport, Sample, figure_of, sample_of, verdicts_of
from benchmarks.moe.memcpy import shared_rows
from benchmarks.moe.rank import SECONDS, serve
from benchmarks.moe.way import Times, Way
from kvxfer.bench.machine import this_machine


@dataclass(frozen=True, slots=True)
class Settings:
    cases: tuple[Case, ...] = CASES
    blocks: int = 10
    """The number of blocks. In each block every way runs the case's rounds in turn. Ways that are
    only for information run a quarter of them."""
    ways: tuple[Way, ...] = tuple(Way)
    mpi: Path | None = None
    """The compiled alltoallv.cpp; None measures no MPI."""


def run_bench(settings: Settings, status: Callable[[str], None]) -> MoeReport:
    """Raises RankFailed."""
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    figures, samples = [], []
    for case in settings.cases:
        routes = Routes(case)
        taken = list(_measure(settings, routes, status))
        figures.append(figure_of(case, routes.nbytes, routes.expanded_bytes, taken))
        samples.extend(taken)
    measured = set(_ways(settings))
    return MoeReport(
        started_at=started_at,
        machine=machine,
        blocks=settings.blocks,
        mpi=f"{mpi.version()}: {mpi.settings(Way.MPI)}" if Way.MPI in measured else "",
        mpi_tcp=mpi.settings(Way.MPI_TCP) if Way.MPI_TCP in measured else "",
        figures=figures,
        verdicts=verdicts_of(figures),
        samples=samples,
    )


def _ways(settings: Settings) -> tuple[Way, ...]:
    return tuple(way for way in settings.ways if settings.mpi or way not in (Way.MPI, Way.MPI_TCP))


def _measure(settings: Settings, routes: Routes, status: Callable[[str], None]) -> Iterator[Sample]:
    case, ways = routes.case, _ways(settings)
    with contextlib.ExitStack() as stack:
        status(f"{case.name}: starting")
        ranks = stack.enter_context(_started(routes, ways))
        jobs = {
            way: stack.enter_context(mpi.MpiRanks(way, settings.mpi, routes))
            for way in ways
            if settings.mpi and way in (Way.MPI, Way.MPI_TCP)
        }

        def run(way: Way, rounds: int) -> list[Times]:
            return jobs[way].run(rounds) if way in jobs else ranks.run(way, rounds)

        for way in ways:  # not measured: memory is touched
            status(f"{case.name}: {way}, the first rounds")
            run(way, 2)
        for block in range(settings.blocks):
            first = block % len(ways)
            for way in (*ways[first:], *ways[:first]):
                status(f"{case.name}: {way}, block {block + 1} of {settings.blocks}")
                counted = max(1, case.rounds // 4) if way.beside else case.rounds
                rounds = counted + 1
                yield sample_of(case, way, block, rounds, run(way, rounds))


class _Ranks:
    def __init__(self, processes: list[ForkProcess], orders: list[Connection]) -> None:
        self._processes, self._orders = processes, orders

    def started(self) -> None:
        self._answers()

    def run(self, way: Way, rounds: int) -> list[Times]:
        for each in self._orders:
            each.send((way, rounds))
        return self._answers()

    def _answers(self) -> list[Times]:
        """Returns the answer of each rank. Raises RankFailed."""
        answers: dict[int, Times] = {}
        waiting = dict(enumerate(self._orders))
        while waiting:
            found = wait(
                [*waiting.values(), *(each.sentinel for each in self._processes)], 2 * SECONDS
            )
            if not found:
                raise RankFailed(f"rank {min(waiting)} has not ended within {2 * SECONDS:g} s")
            for rank, each in list(waiting.items()):
                if each in found:
                    with contextlib.suppress(EOFError):
                        answers[rank] = each.recv()
                        del waiting[rank]
            for rank, process in enumerate(self._processes):
                if process.exitcode is not None:
                    raise RankFailed(
                        f"process {rank} has ended with {process.exitcode}; what it wrote says why"
                    )
        return [answers[rank] for rank in range(len(answers))]


@contextlib.contextmanager
def _started(routes: Routes, ways: tuple[Way, ...]) -> Iterator[_Ranks]:
    forked = multiprocessing.get_context("fork")
    pipes = [forked.Pipe() for _ in range(routes.case.ranks)]
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="kvxfer-moe-") as folder:
        shared = shared_rows(routes)
        processes = [
            forked.Process(
                target=serve,
                args=(rank, routes, ways, shared, key, Path(folder) / "store", theirs),
                daemon=True,
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        try:
            for each in processes:
                each.start()
            for _, theirs in pipes:
                theirs.close()
            ranks = _Ranks(processes, [ours for ours, _ in pipes])
            ranks.started()
            yield ranks
            for ours, _ in pipes:
                ours.send(None)
            for each in processes:
                each.join(SECONDS)
        finally:
            for each in processes:
                each.kill()
                each.join()
