"""The figures of one run, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import WEIGHTS, Verdict, judge


@dataclass(frozen=True, slots=True)
class Sample:
    """One transfer of all weights, and the other measurements of the same round."""

    fabric: str
    """The fabric of the update and of raw writes; gloo always uses tcp."""
    digests: bool
    round: int
    way: str
    seconds: float
    cpu_seconds: float
    """The processor time of all processes together."""
    stage_seconds: float | None
    """The time of an update without the agreement of all ranks before and after."""


@dataclass(frozen=True, slots=True)
class UpdateFigure:
    """Updates over one fabric, with digests or without."""

    fabric: str
    digests: bool
    gb_per_s: Mapping[str, float]
    """The median of all rounds, by way."""
    cpu_seconds: Mapping[str, float]
    """The same for the processor time of all ranks."""
    seconds: float
    stage_seconds: float
    """The medians of the update."""
    ratios: Mapping[str, float]
    """The speed of the update as a multiple of each way's; the median of the rounds' ratios."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    started_at: str
    machine: Machine
    parameters: int
    nbytes: int
    """The bytes that arrive at all inference ranks together."""
    senders: int
    receivers: int
    rounds: int
    figures: Sequence[UpdateFigure]
    verdicts: Sequence[Verdict]
    samples: Sequence[Sample]


def figures_of(samples: Sequence[Sample], nbytes: int) -> list[UpdateFigure]:
    """Returns the figures in the order in which they were measured."""
    cases = dict.fromkeys((each.fabric, each.digests) for each in samples)
    return [_figure(fabric, digests, samples, nbytes) for fabric, digests in cases]


def _figure(fabric: str, digests: bool, samples: Sequence[Sample], nbytes: int) -> UpdateFigure:
    ours = [each for each in samples if (each.fabric, each.digests) == (fabric, digests)]
    ways: dict[str, dict[int, float]] = {}
    cpu: dict[str, list[float]] = {}
    for each in ours:
        ways.setdefault(each.way, {})[each.round] = each.seconds
        cpu.setdefault(each.way, []).append(each.cpu_seconds)
    update = ways["update"]
    return UpdateFigure(
        fabric=fabric,
        digests=digests,
        gb_per_s={way: nbytes / median(taken.values()) / 1e9 for way, taken in ways.items()},
        cpu_seconds={way: median(taken) for way, taken in cpu.items()},
        seconds=median(update.values()),
        stage_seconds=median(each.stage_seconds or 0.0 for each in ours if each.way == "update"),
        ratios={
            way: median(seconds / update[number] for number, seconds in taken.items())
            for way, taken in ways.items()
            if way != "update"
        },
    )


def verdicts_of(figures: Sequence[UpdateFigure]) -> list[Verdict]:
    """Judges the figures that were measured."""
    return [
        judge(figure.ratios[way], target)
        for figure in figures
        for way, target in WEIGHTS.get((figure.fabric, figure.digests), {}).items()
    ]
