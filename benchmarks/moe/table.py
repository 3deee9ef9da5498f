"""A report as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import RenderableType
from rich.table import Table

from benchmarks.moe.figures import PHASES, CaseFigure, MoeReport, PhaseFigure
from benchmarks.moe.way import Way
from kvxfer.bench.render import columns, heading, verdict_table

_TITLES: Final = {
    Way.LOCAL: "kvxfer, local",
    Way.LOCAL_EXPERTS: "kvxfer, local, by expert",
    Way.TCP: "kvxfer, tcp",
    Way.TCP_EXPERTS: "kvxfer, tcp, by expert",
    Way.MEMCPY: "memcpy of each row",
    Way.MPI: "MPI_Alltoallv",
    Way.MPI_TCP: "MPI_Alltoallv over tcp",
    Way.GLOO: "gloo all_to_all_single",
}


def report_tables(report: MoeReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at,
        report.machine,
        f"medians of {report.blocks} blocks of rounds, in which all ways take turns",
        *(f"MPI: {each}" for each in (report.mpi, report.mpi_tcp) if each),
    )
    for figure in report.figures:
        yield _case(figure)
    yield verdict_table(report.verdicts)


def _case(figure: CaseFigure) -> Table:
    case = figure.case
    ways = {each.way: each for each in figure.ways}
    table = columns(
        f"{case.name} of each rank, {case.hidden:,} bf16, top-{case.top_k} of {case.experts}: "
        f"{figure.nbytes / 1e6:,.1f} MB of all ranks, {figure.expanded_bytes / 1e6:,.1f} MB by "
        "expert",
        ("way", "phase"),
        ("rounds", "µs", "p99", "GB/s", "local", "tcp"),
        caption="GB/s: of the rows after deduplication; local, tcp: how many times as fast kvxfer "
        "is over this fabric",
    )
    for way, each in ways.items():
        for phase in PHASES:
            of_it: PhaseFigure = getattr(each, phase)
            table.add_row(
                _TITLES[way] if phase == PHASES[0] else None,
                phase,
                str(each.rounds),
                f"{of_it.median_us:,.0f}",
                None if of_it.p99_us is None else f"{of_it.p99_us:,.0f}",
                f"{of_it.gb_per_s:.2f}",
                *(
                    f"{getattr(ways[ours], phase).ratios[way]:.2f}"
                    if ours in ways and way.fabric is None
                    else None
                    for ours in (Way.LOCAL, Way.TCP)
                ),
            )
    return table
