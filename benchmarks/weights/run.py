"""Runs the benchmark's processes, and makes the report."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.weights.figures import Sample, WeightsReport, figures_of, verdicts_of
from benchmarks.weights.model import held_by, model_of, pieces, wanted_by
from benchmarks.weights.rank import RECEIVERS, SECONDS, SENDERS, WAYS, WORLD, Rank, all_say
from benchmarks.weights.receiver import Receiver
from benchmarks.weights.sender import Sender
from kvxfer.bench.machine import this_machine

_ENGINE_WAYS: Final = ("update", "raw")


@dataclass(frozen=True, slots=True)
class Settings:
    gb: float = 2.0
    """10⁹ bytes of parameters."""
    rounds: int = 5
    fabrics: tuple[str, ...] = ("tcp", "local")


class RankFailed(Exception):
    """A process of the benchmark has ended early."""


def run_bench(settings: Settings, status: Callable[[str], None]) -> WeightsReport:
    """Raises RankFailed."""
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    samples = _measure(settings, status)
    model = model_of(int(settings.gb * 1e9))
    nbytes = sum(
        each.nbytes
        for sender in range(SENDERS)
        for receiver in range(RECEIVERS)
        for each in pieces(held_by(model, sender, SENDERS), wanted_by(model, receiver, RECEIVERS))
    )
    figures = figures_of(samples, nbytes)
    return WeightsReport(
        started_at=started_at,
        machine=machine,
        parameters=len(model),
        nbytes=nbytes,
        senders=SENDERS,
        receivers=RECEIVERS,
        rounds=settings.rounds,
        figures=figures,
        verdicts=verdicts_of(figures),
        samples=samples,
    )


def _measure(settings: Settings, status: Callable[[str], None]) -> list[Sample]:
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    key = secrets.token_hex(16)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="kvxfer-weights-") as folder:
        store = Path(folder) / "store"
        ranks = [
            forked.Process(target=_rank, args=(rank, settings, key, store, theirs), daemon=True)
            for rank in range(WORLD)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            while True:
                status(f"{len(samples)} transfers measured")
                found = wait([ours, *(rank.sentinel for rank in ranks)], timeout=2 * SECONDS)
                if not found:
                    raise RankFailed(f"nothing was measured for {2 * SECONDS:g} s")
                if ours in found:
                    sample = ours.recv()
                    if sample is None:
                        return samples
                    samples.append(sample)
                    continue
                ended = next(each for each in ranks if each.sentinel in found)
                if ended.exitcode:
                    raise RankFailed(
                        f"process {ranks.index(ended)} has ended with {ended.exitcode}; "
                        "what it wrote says why"
                    )
                ranks = [each for each in ranks if each is not ended]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _rank(rank: int, settings: Settings, key: str, store: Path, tell: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=SECONDS),
    )
    model = model_of(int(settings.gb * 1e9))
    kind: type[Rank] = Sender if rank < SENDERS else Receiver
    ours = kind(rank, model, key)

    def say(sample: Any) -> None:
        if rank == 0:
            tell.send(sample)

    for fabric in settings.fabrics:
        for digests in (False, True):
            ways = _ENGINE_WAYS if digests else WAYS
            with ours.connected(fabric, digests):
                for way in ways:  # not measured: touches memory, makes the plan, checks bytes
                    ours.blank(way)
                    _timed(ours, way)
                    ours.check(way)
                for number in range(settings.rounds):
                    first = number % len(ways)
                    for way in (*ways[first:], *ways[:first]):
                        seconds, cpu = _timed(ours, way)
                        staged = ours.stage_seconds if way == "update" else None
                        say(Sample(fabric, digests, number, way, seconds, cpu, staged))
                dist.barrier()
    say(None)
    dist.destroy_process_group()


def _timed(rank: Rank, way: str) -> tuple[float, float]:
    """Returns the seconds from the common start until all ranks have ended, and their processor
    time."""
    dist.barrier()
    begin, used = time.monotonic(), time.process_time()
    rank.move(way)
    dist.barrier()
    seconds = time.monotonic() - begin
    return seconds, sum(all_say(time.process_time() - used))
