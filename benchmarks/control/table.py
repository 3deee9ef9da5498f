"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks.control.figures import ControlReport


def report_tables(report: ControlReport) -> Iterator[RenderableType]:
    machine = report.machine
    yield Text(
        f"{report.started_at}  {machine.cores} cores, {machine.cpu}, Linux {machine.kernel}; "
        f"load average before the run {report.load_average:.1f}\n"
        f"The control plane and an empty FastAPI route, one process each, {report.connections} "
        f"connections; medians of {report.rounds} rounds of {report.round_seconds:g} s in turn, "
        "ratios within a round"
    )
    yield _routes(report)
    yield _fleet(report)


def _routes(report: ControlReport) -> Table:
    table = Table(title="Requests", title_justify="left")
    table.add_column("registry", no_wrap=True)
    table.add_column("route", no_wrap=True)
    for column in ("per s", "p50 ms", "p99 ms", "CPU µs", "ratio", "target", "load"):
        table.add_column(column, justify="right")
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
                Text(f"{each.ratio:.2f}", style="green" if each.met else "bold red"),
                f"≥{each.target:.2f}",
                f"{each.generator_cores:.0%}",
            )
        table.add_section()
    table.caption = (
        "CPU µs: of the server, per request; load: the load generator's share of one core"
    )
    return table


def _fleet(report: ControlReport) -> Table:
    table = Table(title="The fleet", title_justify="left")
    table.add_column("registry")
    for column in ("instances", "joined, s", "back after loss, s"):
        table.add_column(column, justify="right")
    table.add_column("process, B each", justify="right")
    table.add_column("Redis, B each", justify="right")
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
    table.caption = "after data loss every instance has a heartbeat refused and registers again"
    return table
