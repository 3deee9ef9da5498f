"""The figures of one run, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from benchmarks.moe.cases import Case
from benchmarks.moe.way import Times, Way
from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import MOE, MOE_MEMCPY, MOE_MPI, Target, Verdict, judge

PHASES: Final = ("dispatch", "combine")
_P99_ROUNDS: Final = 50
"""The fewest rounds whose 99th percentile is reported."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Consecutive rounds of one way, in microseconds from the begin of the slowest rank until all
    ranks have ended. Earlier work of a faster rank counts in the phase before. So the two phases of
    a round add up to its whole time."""

    case: str
    way: Way
    block: int
    dispatch: list[float]
    combine: list[float]


def sample_of(case: Case, way: Way, block: int, rounds: int, times: Sequence[Times]) -> Sample:
    """Makes a sample of the times of all ranks. The first round wakes the ranks and does not count.
    memcpy has only one row of times for all rounds."""
    spans = np.diff(np.stack(times).max(axis=0), axis=1) / 1e3
    counted = spans / rounds if way is Way.MEMCPY else spans[1:]
    return Sample(case.name, way, block, counted[:, 0].tolist(), counted[:, 1].tolist())


@dataclass(frozen=True, slots=True)
class PhaseFigure:
    """The figures of one phase. `gb_per_s` counts the rows after deduplication, of all ranks
    together. `ratios` say how many times as fast this way is as each other way; each is the median
    over the blocks of the ratio of medians."""

    median_us: float
    p99_us: float | None
    gb_per_s: float
    ratios: Mapping[Way, float]


@dataclass(frozen=True, slots=True)
class WayFigure:
    way: Way
    rounds: int
    dispatch: PhaseFigure
    combine: PhaseFigure


@dataclass(frozen=True, slots=True)
class CaseFigure:
    """All bytes of one dispatch: `nbytes` after deduplication, `expanded_bytes` by expert."""

    case: Case
    nbytes: int
    expanded_bytes: int
    ways: Sequence[WayFigure]


@dataclass(frozen=True, slots=True)
class MoeReport:
    started_at: str
    machine: Machine
    blocks: int
    mpi: str
    """The version and the settings; empty if it was not measured."""
    mpi_tcp: str
    figures: Sequence[CaseFigure]
    verdicts: Sequence[Verdict]
    samples: Sequence[Sample]


def figure_of(
    case: Case, nbytes: int, expanded_bytes: int, samples: Sequence[Sample]
) -> CaseFigure:
    """Returns the figures of one case by way, in the order of the tables."""
    by_way: dict[Way, list[Sample]] = {}
    for each in samples:
        by_way.setdefault(each.way, []).append(each)
    phases = {phase: _phase_figures(by_way, phase, nbytes) for phase in PHASES}
    ways = [
        WayFigure(
            way,
            sum(len(each.dispatch) for each in by_way[way]),
            phases["dispatch"][way],
            phases["combine"][way],
        )
        for way in Way
        if way in by_way
    ]
    return CaseFigure(case, nbytes, expanded_bytes, ways)


def _phase_figures(
    by_way: Mapping[Way, Sequence[Sample]], phase: str, nbytes: int
) -> dict[Way, PhaseFigure]:
    taken: dict[Way, list[list[float]]] = {
        way: [getattr(each, phase) for each in samples] for way, samples in by_way.items()
    }
    medians = {way: [median(block) for block in blocks] for way, blocks in taken.items()}
    found = {}
    for way, blocks in taken.items():
        rounds = [one for block in blocks for one in block]
        middle = median(rounds)
        found[way] = PhaseFigure(
            median_us=middle,
            p99_us=float(np.percentile(rounds, 99)) if len(rounds) >= _P99_ROUNDS else None,
            gb_per_s=nbytes / middle / 1e3,
            ratios={
                other: median(b / a for a, b in zip(medians[way], medians[other], strict=True))
                for other in taken
                if other is not way
            },
        )
    return found


def verdicts_of(figures: Sequence[CaseFigure]) -> list[Verdict]:
    """Judges the targets of this run. Each figure is from the phase further from its target."""
    found = []
    for figure in figures:
        targets = MOE.get((figure.case.ranks, figure.case.tokens), {})
        ways = {each.way: each for each in figure.ways}
        for name, target in targets.items():
            ours = ways.get(Way.TCP if name == "tcp" else Way.LOCAL)
            rate = _against_host if name == "host" else _against_gloo
            if ours is not None and (verdict := _judge(ours, rate, target)) is not None:
                found.append(verdict)
    return found


def _judge(
    ours: WayFigure, rate: Callable[[Mapping[Way, float]], float | None], target: Target
) -> Verdict | None:
    rates = [rate(ours.dispatch.ratios), rate(ours.combine.ratios)]
    known = [each for each in rates if each is not None]
    return judge(min(known), target) if len(known) == len(rates) else None


def _against_gloo(ratios: Mapping[Way, float]) -> float | None:
    return ratios.get(Way.GLOO)


def _against_host(ratios: Mapping[Way, float]) -> float | None:
    if Way.MPI not in ratios or Way.MEMCPY not in ratios:
        return None
    return max(ratios[Way.MPI] / MOE_MPI, ratios[Way.MEMCPY] / MOE_MEMCPY)
