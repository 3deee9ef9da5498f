"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.bench.cases import LIMIT_TITLES
from kvxfer.bench.figures import ChecksumFigure, IdleFigure, OverheadFigure, Report
from kvxfer.bench.idle import TARGET_PERCENT


def report_tables(report: Report) -> Iterator[RenderableType]:
    """Everything a report holds, in the order it is read."""
    machine = report.machine
    yield Text(
        f"{report.started_at}  {machine.cores} cores, {machine.cpu}, Linux {machine.kernel}\n"
        f"{report.request_bytes >> 20} MiB per request in pages scattered over pools of "
        f"{report.pool_bytes >> 20} MiB; medians of {report.rounds} rounds, each with its limit "
        f"beside it and verified byte for byte; seed {report.seed}"
    )
    for figures in report.cases:
        if figures.skipped is not None:
            yield Text(f"{figures.name} was not measured: {figures.skipped}", style="yellow")
    if report.cases:
        yield _throughput_table(report)
        yield _latency_table(report)
        yield _cpu_table(report)
    if report.connect or report.registration:
        yield _setup_table(report)
    if report.checksum:
        yield _checksum_table(report.checksum)
    if report.idle:
        yield idle_table(report.idle)


def idle_table(figures: list[IdleFigure]) -> Table:
    table = Table(title="Idle, one connected peer", title_justify="left")
    for heading in ("fabric", "seconds", "sender", "receiver", "target"):
        table.add_column(heading, justify="left" if heading == "fabric" else "right")
    for each in figures:
        table.add_row(
            each.fabric,
            f"{each.seconds:.1f}",
            *(
                _judged(f"{percent:.2f} %", percent <= TARGET_PERCENT)
                for percent in (each.sender_percent, each.receiver_percent)
            ),
            f"≤ {TARGET_PERCENT} %",
        )
    return table


def overhead_table(figures: list[OverheadFigure]) -> Table:
    table = Table(title="Engine overhead, ns per page", title_justify="left")
    table.add_column("pages")
    for heading in ("number", "writes", "call", "min", "complete", "min", "target"):
        table.add_column(heading, justify="right")
    for each in figures:
        table.add_row(
            each.name,
            f"{each.pages:,}",
            f"{each.writes:,}",
            f"{each.call_p50:.2f}",
            f"{each.call_min:.2f}",
            _judged(f"{each.completed_p50:.2f}", each.met),
            f"{each.completed_min:.2f}",
            f"≤ {each.target:g}",
        )
    return table


def _throughput_table(report: Report) -> Table:
    table = Table(title="Throughput", title_justify="left")
    table.add_column("fabric")
    table.add_column("limit")
    for heading in ("page", "GB/s", "limit", "ratio", "target", "pages/s", "limit"):
        table.add_column(heading, justify="right")
    for figures in report.cases:
        for each in figures.throughput:
            table.add_row(
                figures.name,
                LIMIT_TITLES[figures.limit],
                f"{each.page_bytes >> 10} KiB",
                f"{each.gb_per_s:.2f}",
                f"{each.limit_gb_per_s:.2f}",
                _judged(f"{each.ratio:.2f}", each.met),
                f"≥ {each.target:.2f}",
                f"{each.pages_per_s:,.0f}",
                f"{each.limit_pages_per_s:,.0f}",
            )
        table.add_section()
    return table


def _latency_table(report: Report) -> Table:
    table = Table(
        title="Latency of one 4 KiB write until the receiver's counter shows it, µs",
        title_justify="left",
    )
    table.add_column("fabric")
    table.add_column("writes")
    for heading in ("p50", "p99", "limit p50", "limit p99", "ratio"):
        table.add_column(heading, justify="right")
    for figures in report.cases:
        for each in figures.latency:
            gap = f"every {each.gap_ns / 1e6:g} ms" if each.gap_ns else "back to back"
            microseconds = (
                each.engine_p50_ns,
                each.engine_p99_ns,
                each.limit_p50_ns,
                each.limit_p99_ns,
            )
            table.add_row(
                figures.name,
                gap,
                *(f"{nanoseconds / 1e3:.1f}" for nanoseconds in microseconds),
                f"{each.ratio:.1f}",
            )
    return table


def _cpu_table(report: Report) -> Table:
    table = Table(title="CPU seconds per GB", title_justify="left")
    table.add_column("fabric")
    for heading in ("page", "sender", "receiver", "both"):
        table.add_column(heading, justify="right")
    for figures in report.cases:
        for each in figures.cpu:
            sides = (each.sender_s_per_gb, each.receiver_s_per_gb)
            table.add_row(
                figures.name,
                f"{each.page_bytes >> 10} KiB",
                *(f"{seconds:.3f}" for seconds in (*sides, sum(sides))),
            )
    return table


def _setup_table(report: Report) -> Table:
    table = Table(title="Set-up, ms", title_justify="left")
    table.add_column("what")
    for heading in ("p50", "p99", "limit p50", "limit p99"):
        table.add_column(heading, justify="right")
    for each in report.connect:
        table.add_row(
            f"connect a new peer over {each.fabric} to its first byte; limit: raw TCP",
            *(
                f"{nanoseconds / 1e6:.2f}"
                for nanoseconds in (each.p50_ns, each.p99_ns, each.limit_p50_ns, each.limit_p99_ns)
            ),
        )
    if (took := report.registration) is not None:
        size = f"{took.nbytes >> 20} MiB"
        table.add_row(f"alloc {size}", f"{took.alloc_ns / 1e6:.2f}")
        table.add_row(
            f"alloc {size} and write every page; limit: anonymous memory",
            f"{took.touched_ns / 1e6:.1f}",
            None,
            f"{took.anonymous_touched_ns / 1e6:.1f}",
        )
        table.add_row(f"register {size} that is present", f"{took.register_ns / 1e6:.2f}")
    return table


def _checksum_table(figures: list[ChecksumFigure]) -> Table:
    table = Table(title="Checksum of scattered pages, one thread", title_justify="left")
    for heading in ("page", "GB/s", "memcpy", "ratio"):
        table.add_column(heading, justify="right")
    for each in figures:
        table.add_row(
            f"{each.page_bytes >> 10} KiB",
            *(f"{value:.2f}" for value in (each.gb_per_s, each.copy_gb_per_s, each.ratio)),
        )
    return table


def _judged(figure: str, met: bool) -> Text:
    return Text(figure, style="green" if met else "bold red")
