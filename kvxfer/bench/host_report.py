"""The report of a run between two hosts, and its tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.bench.machine import End
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.render import columns
from kvxfer.bench.settings import Settings

RAW_TCP = "raw TCP, 1 MiB buffers"
LINE_RATE = "line rate"


@dataclass(frozen=True, slots=True)
class HostThroughput:
    """One page size. `engine_ns` and `limit_ns` are the nanoseconds of each round's requests;
    figures are medians over the rounds' means. `limit_ns` is empty if the limit is the line rate.
    `ratio` is that of the engine's throughput to the limit's; None without a limit.
    `verified_bytes` includes the round and the requests that are not timed."""

    page_bytes: int
    request_bytes: int
    engine_ns: list[list[int]]
    limit_ns: list[list[int]]
    gb_per_s: float
    gbit_per_s: float
    pages_per_s: float
    limit_gbit_per_s: float | None
    ratio: float | None
    verified_bytes: int


def host_throughput(
    draw: PageDraw,
    engine_ns: list[list[int]],
    limit_ns: list[list[int]],
    line_bits_per_s: int | None,
) -> HostThroughput:
    """Returns the figure. The limit is the time of `limit_ns`, or else the line rate if known."""
    engine_rounds = np.mean(engine_ns, axis=1)
    engine = draw.request_bytes / float(np.median(engine_rounds))
    limit = ratio = None
    if limit_ns:
        limit_rounds = np.mean(limit_ns, axis=1)
        limit = 8 * draw.request_bytes / float(np.median(limit_rounds))
        ratio = float(np.median(limit_rounds / engine_rounds))
    elif line_bits_per_s:
        limit = line_bits_per_s / 1e9
        ratio = 8 * engine / limit
    return HostThroughput(
        page_bytes=draw.page_bytes,
        request_bytes=draw.request_bytes,
        engine_ns=engine_ns,
        limit_ns=limit_ns,
        gb_per_s=engine,
        gbit_per_s=8 * engine,
        pages_per_s=engine * 1e9 / draw.page_bytes,
        limit_gbit_per_s=limit,
        ratio=ratio,
        verified_bytes=draw.request_bytes * draw.requests * (len(engine_ns) + 1),
    )


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """Nanoseconds, by the sender's clock, from the call that submits one write until the receiver's
    answer to it is at the sender's counter: two writes, and both programs, which wait on asyncio.
    `gap_ns` is the pause before each: 0 is back to back. `nanoseconds` are by round."""

    message_bytes: int
    gap_ns: int
    p50_ns: float
    p99_ns: float
    nanoseconds: list[list[int]]


def round_trip(message_bytes: int, gap_ns: int, nanoseconds: list[list[int]]) -> RoundTrip:
    p50, p99 = np.percentile(np.concatenate(nanoseconds), (50, 99))
    return RoundTrip(message_bytes, gap_ns, float(p50), float(p99), nanoseconds)


@dataclass(frozen=True, slots=True)
class Way:
    """The measurements over all NICs of the sender (`nic` is None), or over one of them; tcp has no
    NICs. `limit` names the limit beside the throughput, empty if there is none; then
    `without_limit` says why."""

    nic: str | None
    limit: str
    without_limit: str | None
    skipped: str | None = None
    throughput: list[HostThroughput] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pull:
    """A NIC that goes down while requests run. `skipped` says why nothing was seen. The notices are
    those of either engine; `in_flight` says whether the first came while a request ran.
    `longest_ms` is the longest request from then on; counts and bytes were exact throughout."""

    skipped: str | None = None
    sender_notices: list[str] = field(default_factory=list)
    receiver_notices: list[str] = field(default_factory=list)
    in_flight: bool = False
    before_gb_per_s: float = 0.0
    after_gb_per_s: float = 0.0
    longest_ms: float = 0.0
    verified_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FabricFigures:
    """All figures of one fabric; `skipped` says why there are none."""

    fabric: str
    skipped: str | None = None
    ways: list[Way] = field(default_factory=list)
    pull: Pull | None = None


@dataclass(frozen=True, slots=True)
class HostReport:
    """One run. `started_at` is ISO 8601 in UTC; the receiver listens at `server`."""

    started_at: str
    server: str
    sender: End
    receiver: End
    seed: int
    rounds: int
    requests: int
    request_bytes: int
    pool_bytes: int
    page_bytes: tuple[int, ...]
    fabrics: list[FabricFigures]
    verified_bytes: int


def host_report(
    started_at: str,
    server: str,
    ends: tuple[End, End],
    settings: Settings,
    fabrics: list[FabricFigures],
) -> HostReport:
    """Makes the report; `ends` are sender and receiver."""
    verified = sum(
        each.verified_bytes
        for figures in fabrics
        for way in figures.ways
        for each in way.throughput
    ) + sum(figures.pull.verified_bytes for figures in fabrics if figures.pull is not None)
    return HostReport(
        started_at=started_at,
        server=server,
        sender=ends[0],
        receiver=ends[1],
        seed=settings.seed,
        rounds=settings.rounds,
        requests=settings.requests,
        request_bytes=settings.request_bytes,
        pool_bytes=settings.pool_bytes,
        page_bytes=settings.page_bytes,
        fabrics=fabrics,
        verified_bytes=verified,
    )


def host_tables(report: HostReport) -> Iterator[RenderableType]:
    """Yields everything a report holds, in the order it is read."""
    yield Text(
        f"{report.started_at}  kvxfer {report.sender.version}\n"
        f"sender {_end(report.sender)}\n"
        f"receiver {_end(report.receiver)}, at {report.server}\n"
        f"{report.request_bytes >> 20} MiB per request in pages scattered over pools of "
        f"{report.pool_bytes >> 20} MiB; medians of {report.rounds} rounds; "
        f"{report.verified_bytes:,} bytes verified by the receiver; seed {report.seed}"
    )
    for figures in report.fabrics:
        if figures.skipped is not None:
            yield Text(f"{figures.fabric} was not measured: {figures.skipped}", style="yellow")
        for way in figures.ways:
            if way.skipped is not None:
                yield Text(
                    f"{figures.fabric} over {way.nic} was not measured: {way.skipped}",
                    style="yellow",
                )
            if way.without_limit is not None:
                yield Text(f"{figures.fabric} has no limit beside it: {way.without_limit}")
    yield _throughput_table(report)
    yield _round_trip_table(report)
    for figures in report.fabrics:
        if figures.pull is not None:
            yield _pull_text(figures.fabric, figures.pull)


def _end(end: End) -> str:
    machine = end.machine
    nics = ", ".join(f"{nic.name} {nic.bits_per_second / 1e9:g} Gbit/s" for nic in end.nics)
    return (
        f"{end.host}: {machine.cores} cores, {machine.cpu}, Linux {machine.kernel}, load average "
        f"{machine.load_average:.1f}; {nics or 'no NICs of verbs or ofi'}; "
        f"{'host memory' if end.gpu is None else f'memory of GPU {end.gpu}'}"
    )


def _throughput_table(report: HostReport) -> Table:
    right = ("page", "GB/s", "Gbit/s", "limit", "ratio", "pages/s")
    table = columns("Throughput", ("fabric", "NICs", "limit, Gbit/s"), right)
    for figures in report.fabrics:
        for way in figures.ways:
            for each in way.throughput:
                table.add_row(
                    figures.fabric,
                    way.nic or "all",
                    way.limit,
                    f"{each.page_bytes >> 10} KiB",
                    f"{each.gb_per_s:.2f}",
                    f"{each.gbit_per_s:.1f}",
                    None if each.limit_gbit_per_s is None else f"{each.limit_gbit_per_s:.1f}",
                    None if each.ratio is None else f"{each.ratio:.2f}",
                    f"{each.pages_per_s:,.0f}",
                )
            table.add_section()
    return table


def _round_trip_table(report: HostReport) -> Table:
    table = columns(
        "Round trip of one 4 KiB write and the receiver's answer, µs",
        ("fabric", "NICs", "writes"),
        ("p50", "p99"),
    )
    for figures in report.fabrics:
        for way in figures.ways:
            for each in way.round_trips:
                table.add_row(
                    figures.fabric,
                    way.nic or "all",
                    f"every {each.gap_ns / 1e6:g} ms" if each.gap_ns else "back to back",
                    *(f"{nanoseconds / 1e3:.1f}" for nanoseconds in (each.p50_ns, each.p99_ns)),
                )
    return table


def _pull_text(fabric: str, pull: Pull) -> Text:
    if pull.skipped is not None:
        return Text(f"No NIC of {fabric} was pulled: {pull.skipped}", style="yellow")
    when = "while a request ran" if pull.in_flight else "between two requests"
    return Text(
        f"A NIC of {fabric} was pulled, {when}. "
        f"Sender: {'; '.join(pull.sender_notices) or 'no notice'}. "
        f"Receiver: {'; '.join(pull.receiver_notices) or 'no notice'}. "
        f"{pull.before_gb_per_s:.2f} GB/s before, {pull.after_gb_per_s:.2f} after; the longest "
        f"request took {pull.longest_ms:.0f} ms; {pull.verified_bytes:,} bytes verified."
    )
