"""The figures of one run, for tables and for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.control.generator import Answers
from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import Target


@dataclass(frozen=True, slots=True)
class LoadFigure:
    """Requests of one kind: the median rate of the rounds, and latencies over all rounds."""

    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    """Processor time of the server per request, in microseconds, without Redis."""
    generator_cores: float
    """Processor time of the load generator per second. At 1 it is the bottleneck."""


@dataclass(frozen=True, slots=True)
class RouteFigure(LoadFigure):
    """A route of the control plane. `ratio` is the median over the rounds of its ratio to the
    empty route."""

    route: str
    ratio: float
    least_ratio: float
    target: Target
    met: bool


@dataclass(frozen=True, slots=True)
class RegistryFigures:
    registry: str
    instances: int
    routes: Sequence[RouteFigure]
    empty: LoadFigure
    registration_seconds: float
    """Registrations of the whole fleet, one after another on each connection."""
    reregistration_seconds: float
    """After data loss: each instance gets a heartbeat refused and registers again."""
    process_bytes_per_instance: float
    redis_bytes_per_instance: float | None


@dataclass(frozen=True, slots=True)
class ControlReport:
    started_at: str
    machine: Machine
    connections: int
    rounds: int
    round_seconds: float
    registries: Sequence[RegistryFigures]

    @property
    def passed(self) -> bool:
        routes = (route for figures in self.registries for route in figures.routes)
        return all(route.met or not route.target.required for route in routes)


def route_figure(
    route: str, measured: Sequence[Answers], empty: Sequence[Answers], target: Target
) -> RouteFigure:
    """Returns the figure of a route, from its rounds and the empty route's rounds beside them."""
    ratios = [our.per_second / limit.per_second for our, limit in zip(measured, empty, strict=True)]
    load, ratio = load_figure(measured), median(ratios)
    return RouteFigure(
        per_second=load.per_second,
        p50_ms=load.p50_ms,
        p99_ms=load.p99_ms,
        cpu_us=load.cpu_us,
        generator_cores=load.generator_cores,
        route=route,
        ratio=ratio,
        least_ratio=min(ratios),
        target=target,
        met=target.met(ratio),
    )


def load_figure(rounds: Sequence[Answers]) -> LoadFigure:
    latencies = np.concatenate([each.latencies for each in rounds])
    p50, p99 = np.percentile(latencies, (50, 99))
    return LoadFigure(
        per_second=median(each.per_second for each in rounds),
        p50_ms=float(p50) * 1e3,
        p99_ms=float(p99) * 1e3,
        cpu_us=sum(each.server_cpu_seconds for each in rounds) / len(latencies) * 1e6,
        generator_cores=max(each.cpu_seconds / each.seconds for each in rounds),
    )


@dataclass(frozen=True, slots=True)
class TracedCall:
    """The time of the control plane's busiest call, without HTTP."""

    name: str
    cpu_us: float
    """The time in the fastest round."""
    ratio: float
    """The ratio to the time with tracing removed."""


@dataclass(frozen=True, slots=True)
class TracingReport:
    calls: Sequence[TracedCall]
    step_us: float
    """CPU time of a traced step of code outside a trace."""
