"""The figures of a run. Each keeps its samples, so that `--json` loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvxfer.bench.cases import Case, Limit
from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import Target, throughput_target


@dataclass(frozen=True, slots=True)
class ThroughputFigure:
    """One page size of one case. `engine_ns` and `limit_ns` are the nanoseconds of each round's
    requests; figures are medians over the rounds' means; the ratio is the median of the rounds'
    ratios of the engine's throughput to the limit's."""

    page_bytes: int
    request_bytes: int
    engine_ns: list[list[int]]
    limit_ns: list[list[int]]
    gb_per_s: float
    pages_per_s: float
    limit_gb_per_s: float
    limit_pages_per_s: float
    ratio: float
    target: Target
    met: bool


def throughput_figure(
    case: Case,
    page_bytes: int,
    request_bytes: int,
    engine_ns: list[list[int]],
    limit_ns: list[list[int]],
) -> ThroughputFigure:
    engine_rounds, limit_rounds = np.mean(engine_ns, axis=1), np.mean(limit_ns, axis=1)
    ratio = float(np.median(limit_rounds / engine_rounds))
    engine, limit = float(np.median(engine_rounds)), float(np.median(limit_rounds))
    target = throughput_target(case, page_bytes)
    return ThroughputFigure(
        page_bytes=page_bytes,
        request_bytes=request_bytes,
        engine_ns=engine_ns,
        limit_ns=limit_ns,
        gb_per_s=request_bytes / engine,
        pages_per_s=request_bytes / page_bytes / engine * 1e9,
        limit_gb_per_s=request_bytes / limit,
        limit_pages_per_s=request_bytes / page_bytes / limit * 1e9,
        ratio=ratio,
        target=target,
        met=target.met(ratio),
    )


@dataclass(frozen=True, slots=True)
class LatencyFigure:
    """One-way latency of a single write in nanoseconds, from submit until the receiver's counter
    shows it. `gap_ns` is the pause between writes: 0 is back to back, both sides awake. The ratio
    is the median over the rounds of the engine's p50 over the limit's."""

    message_bytes: int
    gap_ns: int
    engine_p50_ns: float
    engine_p99_ns: float
    limit_p50_ns: float
    limit_p99_ns: float
    ratio: float
    engine_ns: list[list[int]]
    limit_ns: list[list[int]]


def latency_figure(
    message_bytes: int, gap_ns: int, engine_ns: list[list[int]], limit_ns: list[list[int]]
) -> LatencyFigure:
    """Returns percentiles over all samples; the inner lists are the rounds."""
    engine_p50, engine_p99 = np.percentile(np.concatenate(engine_ns), (50, 99))
    limit_p50, limit_p99 = np.percentile(np.concatenate(limit_ns), (50, 99))
    ratios = [
        np.median(engine) / np.median(limit)
        for engine, limit in zip(engine_ns, limit_ns, strict=True)
    ]
    return LatencyFigure(
        message_bytes=message_bytes,
        gap_ns=gap_ns,
        engine_p50_ns=float(engine_p50),
        engine_p99_ns=float(engine_p99),
        limit_p50_ns=float(limit_p50),
        limit_p99_ns=float(limit_p99),
        ratio=float(np.median(ratios)),
        engine_ns=engine_ns,
        limit_ns=limit_ns,
    )


@dataclass(frozen=True, slots=True)
class CpuFigure:
    """User and system time per 10^9 bytes moved, all threads of a side."""

    page_bytes: int
    nbytes: int
    sender_s_per_gb: float
    receiver_s_per_gb: float


@dataclass(frozen=True, slots=True)
class ConnectFigure:
    """Nanoseconds from connect to a new peer until its first byte is delivered."""

    fabric: str
    engine_ns: list[int]
    limit_ns: list[int]
    p50_ns: float
    p99_ns: float
    limit_p50_ns: float
    limit_p99_ns: float


def connect_figure(fabric: str, engine_ns: list[int], limit_ns: list[int]) -> ConnectFigure:
    engine_p50, engine_p99 = np.percentile(engine_ns, (50, 99))
    limit_p50, limit_p99 = np.percentile(limit_ns, (50, 99))
    return ConnectFigure(
        fabric=fabric,
        engine_ns=engine_ns,
        limit_ns=limit_ns,
        p50_ns=float(engine_p50),
        p99_ns=float(engine_p99),
        limit_p50_ns=float(limit_p50),
        limit_p99_ns=float(limit_p99),
    )


@dataclass(frozen=True, slots=True)
class RegistrationFigure:
    """Nanoseconds, medians. `alloc_ns` ends when the engine's memory may be used, `touched_ns`
    when each of its pages was written once; `anonymous_touched_ns` is the same for plain
    anonymous memory. `register_ns` is for memory that is present already."""

    nbytes: int
    alloc_ns: float
    touched_ns: float
    anonymous_touched_ns: float
    register_ns: float


@dataclass(frozen=True, slots=True)
class ChecksumFigure:
    """One page size. Nanoseconds of each request, summed and copied; the figures are medians. The
    ratio is the median of the requests' ratios of throughput to their copies'."""

    page_bytes: int
    request_bytes: int
    sum_ns: list[int]
    copy_ns: list[int]
    gb_per_s: float
    copy_gb_per_s: float
    ratio: float


def checksum_figure(
    page_bytes: int, request_bytes: int, sum_ns: list[int], copy_ns: list[int]
) -> ChecksumFigure:
    return ChecksumFigure(
        page_bytes=page_bytes,
        request_bytes=request_bytes,
        sum_ns=sum_ns,
        copy_ns=copy_ns,
        gb_per_s=request_bytes / float(np.median(sum_ns)),
        copy_gb_per_s=request_bytes / float(np.median(copy_ns)),
        ratio=float(np.median(np.divide(copy_ns, sum_ns))),
    )


@dataclass(frozen=True, slots=True)
class IdleFigure:
    """CPU of one engine with one connected, idle peer, in percent of a core."""

    fabric: str
    seconds: float
    sender_percent: float
    receiver_percent: float


@dataclass(frozen=True, slots=True)
class OverheadFigure:
    """The engine's time for one request over a NIC that takes none, in nanoseconds per page: of the
    call, until the request was posted and reported complete, and of the receiver.
    `call_ns`, `completed_ns` and `received_ns` are the nanoseconds of whole requests, one a round,
    the first two from the call's start.
    """

    name: str
    pages: int
    writes: int
    call_ns: list[int]
    completed_ns: list[int]
    received_ns: list[int]
    call_p50: float
    call_min: float
    completed_p50: float
    completed_min: float
    received_p50: float
    target: Target
    received_target: Target
    met: bool


@dataclass(frozen=True, slots=True)
class ScatterFigure:
    """The time until a scatter to `peers` peers is posted: `posted_ns` has each, the median and the
    fastest are in microseconds."""

    peers: int
    posted_ns: list[int]
    posted_p50: float
    posted_min: float
    target: Target
    met: bool


def scatter_figure(peers: int, posted_ns: list[int], target: Target) -> ScatterFigure:
    """Returns the figure; its median must meet the target."""
    median = float(np.median(posted_ns)) / 1000
    return ScatterFigure(
        peers=peers,
        posted_ns=posted_ns,
        posted_p50=median,
        posted_min=min(posted_ns) / 1000,
        target=target,
        met=target.met(median),
    )


def overhead_figure(
    name: str,
    pages: int,
    writes: int,
    call_ns: list[int],
    completed_ns: list[int],
    received_ns: list[int],
    targets: tuple[Target, Target],
) -> OverheadFigure:
    """Returns the figure. The targets are for the nanoseconds per page of the median round, until
    complete and of the receiver."""
    completed = float(np.median(completed_ns)) / pages
    received = float(np.median(received_ns)) / pages
    target, received_target = targets
    return OverheadFigure(
        name=name,
        pages=pages,
        writes=writes,
        call_ns=call_ns,
        completed_ns=completed_ns,
        received_ns=received_ns,
        call_p50=float(np.median(call_ns)) / pages,
        call_min=min(call_ns) / pages,
        completed_p50=completed,
        completed_min=min(completed_ns) / pages,
        received_p50=received,
        target=target,
        received_target=received_target,
        met=target.met(completed) and received_target.met(received),
    )


@dataclass(frozen=True, slots=True)
class CaseFigures:
    """All figures of one case; `skipped` says why there are none."""

    name: str
    limit: Limit
    skipped: str | None = None
    throughput: list[ThroughputFigure] = field(default_factory=list)
    latency: list[LatencyFigure] = field(default_factory=list)
    cpu: list[CpuFigure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `started_at` is ISO 8601 in UTC."""

    started_at: str
    machine: Machine
    seed: int
    rounds: int
    request_bytes: int
    pool_bytes: int
    cases: list[CaseFigures] = field(default_factory=list)
    connect: list[ConnectFigure] = field(default_factory=list)
    registration: RegistrationFigure | None = None
    checksum: list[ChecksumFigure] = field(default_factory=list)
    idle: list[IdleFigure] = field(default_factory=list)
