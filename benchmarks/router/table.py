"""A report as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from benchmarks.router.figures import RouterReport
from kvxfer.bench.render import columns, heading, verdict_table


def report_tables(report: RouterReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at,
        report.machine,
        f"{report.streams} streams of {report.tokens} tokens, {report.rate:g} tokens per second "
        f"each; medians of {report.rounds} rounds in turn, ratios of neighbouring rounds",
    )
    yield _streams(report)
    yield _latencies(report)
    yield verdict_table(report.verdicts)


def _streams(report: RouterReport) -> Table:
    table = columns(
        "Streams",
        ("server",),
        (
            "CPU µs per token",
            "with requests",
            "streams per core",
            "tokens per part",
            "core",
            "load",
        ),
        caption="with requests: and the begin and end of each stream; tokens per part: above 1, "
        "several were passed on at once; core, load: shares of a core that the server and the load "
        "generator took",
    )
    for name, each in report.figures.items():
        table.add_row(
            name,
            f"{each.token_us:.1f}",
            f"{each.whole_us:.1f}",
            f"{each.streams_per_core:.0f}",
            f"{each.tokens_per_part:.2f}",
            f"{each.core_share:.0%}",
            f"{each.client_cores:.0%}",
        )
    return table


def _latencies(report: RouterReport) -> Table:
    table = columns(
        "One request at a time, to the first byte of a stream",
        ("asked",),
        ("p50 ms", "p90 ms"),
    )
    for name, each in report.latencies.items():
        table.add_row(name, f"{each.p50:.2f}", f"{each.p90:.2f}")
    return table
