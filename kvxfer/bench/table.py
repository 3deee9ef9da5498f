"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvxfer.bench.cases import LIMIT_TITLES
from kvxfer.bench.figures import ChecksumFigure, IdleFigure, OverheadFigure, Report, ScatterFigure
from kvxfer.bench.nic_bounds import NicBounds, NicModel
from kvxfer.bench.render import columns, heading, judged
from kvxfer.bench.targets import IDLE


def report_tables(report: Report) -> Iterator[RenderableType]:
    """Yields everything a report holds, in the order it is read."""
    yield heading(
        report.started_at,
        report.machine,
        f"{report.request_bytes >> 20} MiB per request in pages scattered over pools of "
        f"{report.pool_bytes >> 20} MiB; medians of {report.rounds} rounds, each with its limit "
        f"beside it and verified byte for byte; seed {report.seed}",
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
    right = ("seconds", "sender", "receiver", "target")
    table = columns("Idle, one connected peer", ("fabric",), right)
    for each in figures:
        table.add_row(
            each.fabric,
            f"{each.seconds:.1f}",
            *(
                judged(percent, IDLE, f"{percent:.2f} %")
                for percent in (each.sender_percent, each.receiver_percent)
            ),
            str(IDLE),
        )
    return table


def overhead_table(figures: list[OverheadFigure]) -> Table:
    right = ("writes", "call", "complete", "target", "receiver", "target")
    title = f"Engine overhead, ns per page of {figures[0].pages:,}"
    table = columns(title, ("pages",), right)
    for each in figures:
        table.add_row(
            each.name,
            f"{each.writes:,}",
            f"{each.call_p50:.2f}",
            judged(each.completed_p50, each.target, f"{each.completed_p50:.2f}"),
            str(each.target),
            judged(each.received_p50, each.received_target, f"{each.received_p50:.2f}"),
            str(each.received_target),
        )
    return table


def scatter_table(figure: ScatterFigure) -> Table:
    title = "Scatter of 4 KiB to each peer, µs until posted"
    table = columns(title, (), ("peers", "median", "target", "fastest"))
    table.add_row(
        str(figure.peers),
        judged(figure.posted_p50, figure.target, f"{figure.posted_p50:.2f}"),
        str(figure.target),
        f"{figure.posted_min:.2f}",
    )
    return table


def nic_table(nic: NicModel, bounds: list[NicBounds]) -> Iterator[RenderableType]:
    right = ("sender", "receiver", "processor", "writes/s", "wire")
    table = columns(f"{nic.title}: Gbit/s at most", ("page",), (*right, "binds"))
    for each in bounds:
        table.add_row(
            f"{each.page_bytes >> 10} KiB",
            f"{each.sender_ns:.1f} ns",
            f"{each.receiver_ns:.1f} ns",
            f"{each.cpu_gbits:,.0f}",
            f"{each.rate_gbits:,.0f}",
            f"{each.wire_gbits:,.0f}",
            each.binds,
        )
    yield table
    yield Text("processor: measured here, one thread a side, over a NIC that moves nothing")
    for source in nic.sources:
        yield Text(source)


def _throughput_table(report: Report) -> Table:
    right = ("page", "GB/s", "limit", "ratio", "target", "pages/s", "limit")
    table = columns("Throughput", ("fabric", "limit"), right)
    for figures in report.cases:
        for each in figures.throughput:
            table.add_row(
                figures.name,
                LIMIT_TITLES[figures.limit],
                f"{each.page_bytes >> 10} KiB",
                f"{each.gb_per_s:.2f}",
                f"{each.limit_gb_per_s:.2f}",
                judged(each.ratio, each.target, f"{each.ratio:.2f}"),
                str(each.target),
                f"{each.pages_per_s:,.0f}",
                f"{each.limit_pages_per_s:,.0f}",
            )
        table.add_section()
    return table


def _latency_table(report: Report) -> Table:
    table = columns(
        "Latency of one 4 KiB write until the receiver's counter shows it, µs",
        ("fabric", "writes"),
        ("p50", "p99", "limit p50", "limit p99", "ratio"),
    )
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
    table = columns("CPU seconds per GB", ("fabric",), ("page", "sender", "receiver", "both"))
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
    table = columns("Set-up, ms", ("what",), ("p50", "p99", "limit p50", "limit p99"))
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
    right = ("page", "GB/s", "memcpy", "ratio")
    table = columns("Checksum of scattered pages, one thread", (), right)
    for each in figures:
        table.add_row(
            f"{each.page_bytes >> 10} KiB",
            *(f"{value:.2f}" for value in (each.gb_per_s, each.copy_gb_per_s, each.ratio)),
        )
    return table
