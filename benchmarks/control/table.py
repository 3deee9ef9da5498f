"""A report as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from benchmarks.control.figures import ControlReport, TracingReport
from kvxfer.bench.render import columns, heading, judged


def report_tables(report: ControlReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at,
        report.machine,
        f"The control plane and an empty FastAPI route, one process each, {report.connections} "
        f"connections; medians of {report.rounds} rounds of {report.round_seconds:g} s in turn, "
        "ratios within a round",
    )
    yield _routes(report)
    yield _fleet(report)


def _routes(report: ControlReport) -> Table:
    table = columns(
        "Requests",
        ("registry", "route"),
        ("per s", "p50 ms", "p99 ms", "CPU µs", "ratio", "target", "load"),
        caption="CPU µs: of the server, per request; load: the load generator's share of one core",
    )
    for figures in report.registries:
        empty = figures.empty
        table.add_row(
            figures.registry,
            "empty route",
            f"{empty.per_second:,.0f}",
            f"{empty.p50_ms:.1f}",
            f"{empty.p99_ms:.1f}",
            f"{empty.cpu_us:.0f}",
            None,
            None,
            f"{empty.generator_cores:.0%}",
        )
        for each in figures.routes:
            table.add_row(
                None,
                each.route,
                f"{each.per_second:,.0f}",
                f"{each.p50_ms:.1f}",
                f"{each.p99_ms:.1f}",
                f"{each.cpu_us:.0f}",
                judged(each.ratio, each.target, f"{each.ratio:.2f}"),
                str(each.target),
                f"{each.generator_cores:.0%}",
            )
        table.add_section()
    return table


def _fleet(report: ControlReport) -> Table:
    table = columns(
        "The fleet",
        ("registry",),
        ("instances", "joined, s", "back after loss, s", "process, B each", "Redis, B each"),
        caption="after data loss every instance has a heartbeat refused and registers again",
    )
    for figures in report.registries:
        redis = figures.redis_bytes_per_instance
        table.add_row(
            figures.registry,
            f"{figures.instances:,}",
            f"{figures.registration_seconds:.1f}",
            f"{figures.reregistration_seconds:.1f}",
            f"{figures.process_bytes_per_instance:,.0f}",
            None if redis is None else f"{redis:,.0f}",
        )
    return table


def tracing_table(report: TracingReport) -> Table:
    table = columns(
        "What tracing costs", ("POST /v1/transfers, without HTTP",), ("CPU µs", "ratio")
    )
    for call in report.calls:
        table.add_row(call.name, f"{call.cpu_us:.1f}", f"{call.ratio:.3f}")
    table.add_section()
    table.add_row("a step of code where nothing is traced", f"{report.step_us:.2f}")
    return table
