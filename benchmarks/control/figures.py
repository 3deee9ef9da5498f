"""Figures of one run, as they are printed and as JSON has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from benchmarks.control.generator import Answers
from kvxfer.bench.figures import Machine

TARGETS: Final = {"embedded": 0.5, "redis": 0.35}


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """Requests of one kind: the median rate of all rounds, latencies over all of them."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Processor time of the server per request, in microseconds; that of Redis is not in it."""
    generator_cores: float
    """Processor time of the load generator per second: at 1 it would be the bottleneck."""


@dataclass(frozen=True, slots=True)
class RouteFigure(LoadFigure):
    """A route of the control plane; `ratio` is the median of its ratios to the empty route, each
    of one round."""

    route: str
    ratio: float
    least_ratio: float
    target: float

    @property
    def met(self) -> bool:
        return self.ratio >= self.target


@dataclass(frozen=True, slots=True)
class RegistryFigures:
    registry: str
    instances: int
    routes: Sequence[RouteFigure]
    empty: LoadFigure
    registration_seconds: float
    """Of the whole fleet, one after another on each connection."""
    reregistration_seconds: float
    """After data loss: every instance has a heartbeat refused and registers again."""
    process_bytes_per_instance: float
    redis_bytes_per_instance: float | None


@dataclass(frozen=True, slots=True)
class ControlReport:
    started_at: str
    machine: Machine
    connections: int
    rounds: int
    round_seconds: float
    load_average: float
    """Of the minute before the run: what else the machine had to do."""
    registries: Sequence[RegistryFigures]

    @property
    def met(self) -> bool:
        return all(route.met for figures in self.registries for route in figures.routes)


def route_figure(
    route: str, measured: Sequence[Answers], empty: Sequence[Answers], target: float
) -> RouteFigure:
    """The figure of a route from its rounds and those of the empty route beside them."""
    ratios = [our.per_second / limit.per_second for our, limit in zip(measured, empty, strict=True)]
    load = load_figure(measured)
    return RouteFigure(
        per_second=load.per_second,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        cpu_us=load.cpu_us,
        generator_cores=load.generator_cores,
        route=route,
        ratio=median(ratios),
        least_ratio=min(ratios),
        target=target,
    )


def load_figure(rounds: Sequence[Answers]) -> LoadFigure:
    ordered = sorted(latency for each in rounds for latency in each.latencies)
    return LoadFigure(
        per_second=median(each.per_second for each in rounds),
        p50_ms=_percentile(ordered, 0.5) * 1e3,
        p99_ms=_percentile(ordered, 0.99) * 1e3,
        cpu_us=sum(each.server_cpu_seconds for each in rounds) / len(ordered) * 1e6,
        generator_cores=max(each.cpu_seconds / each.seconds for each in rounds),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
