"""A report as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table

from benchmarks.weights.figures import WeightsReport
from kvxfer.bench.render import columns, heading, verdict_table

_TITLES: Final = {
    "update": "weight update",
    "raw": "raw writes of the engine",
    "gather": "gloo: gather, then broadcast",
    "send": "gloo: isend and irecv",
}


def report_tables(report: WeightsReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at,
        report.machine,
        f"{report.parameters} parameters, {report.nbytes / 1e9:.3g} GB in bf16 from "
        f"{report.senders} to {report.receivers} processes; medians of {report.rounds} rounds in "
        "turn, ratios within a round",
    )
    yield _ways(report)
    yield verdict_table(report.verdicts)


def _ways(report: WeightsReport) -> Table:
    table = columns(
        "Weights of all ranks",
        ("fabric", "digests", "way"),
        ("GB/s", "ms", "CPU, ms", "staged, ms", "ratio"),
        caption="CPU: of all processes; staged: from the order to write until all is there; ratio: "
        "how many times as fast the update is",
    )
    for figure in report.figures:
        for way, speed in figure.gb_per_s.items():
            update = way == "update"
            table.add_row(
                figure.fabric if update else None,
                ("on" if figure.digests else "off") if update else None,
                _TITLES[way],
                f"{speed:.2f}",
                f"{report.nbytes / speed / 1e6:,.0f}",
                f"{figure.cpu_seconds[way] * 1e3:,.0f}",
                f"{figure.stage_seconds * 1e3:,.0f}" if update else None,
                None if update else f"{figure.ratios[way]:.2f}",
            )
        table.add_section()
    return table
