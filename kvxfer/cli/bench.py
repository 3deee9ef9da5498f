"""`kvxfer bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.errors import InvalidArgument

IDLE_SECONDS = 10.0
NULL_ROUNDS, NULL_QUICK_ROUNDS = 500, 20


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    sizes: Annotated[
        str | None,
        typer.Option(help="Page sizes in KiB.", show_default="1,4,16,64,256; 1,64 if quick"),
    ] = None,
    fabrics: Annotated[
        str,
        typer.Option(help="What to measure; local-cma is local from memory it did not allocate."),
    ] = "tcp,local,local-cma",
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds per page size.",
            min=1,
            show_default=f"7; 3 if quick; with --null {NULL_ROUNDS}; {NULL_QUICK_ROUNDS} if quick",
        ),
    ] = None,
    total: Annotated[int, typer.Option(help="MiB per request.", min=1)] = 64,
    pool: Annotated[
        int | None, typer.Option(help="MiB per pool.", min=1, show_default="1024; 256 if quick")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Draws the pages.", min=0, show_default="random, printed")
    ] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Measure only what a connected, idle engine costs.")
    ] = False,
    null: Annotated[
        bool,
        typer.Option(
            "--null", help="Measure only the engine's own time per page, over a NIC without any."
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: a smoke test.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw throughput over page size into this file, too.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every figure and sample as JSON.")
    ] = False,
) -> None:
    """Measure the engine between two processes, beside what this host allows.

    Every figure stands beside its limit, measured in the same run: raw TCP, memcpy of the same
    pages, or process_vm_readv. Every byte moved is verified.
    """
    import asyncio
    import secrets
    from functools import partial

    import msgspec

    from kvxfer.bench.cases import cases_by_name
    from kvxfer.bench.null import measure_null
    from kvxfer.bench.plot import check_plot_path, plot_report
    from kvxfer.bench.run import run_bench, run_idle
    from kvxfer.bench.settings import full_settings, quick_settings
    from kvxfer.bench.table import idle_table, overhead_table, report_tables
    from kvxfer.cli.output import out, show_json

    cases = cases_by_name(_split(fabrics))
    settings = (quick_settings if quick else full_settings)(
        cases=cases,
        seed=secrets.randbits(32) if seed is None else seed,
        request_bytes=total << 20,
        page_bytes=None if sizes is None else _page_bytes(sizes),
        pool_bytes=None if pool is None else pool << 20,
        rounds=rounds,
    )
    if plot is not None:
        check_plot_path(plot)

    if idle:
        with _progress_bar(len(settings.fabrics)) as step:
            figures = asyncio.run(run_idle(settings.fabrics, IDLE_SECONDS, step))
        if as_json:
            show_json({"idle": msgspec.to_builtins(figures)})
        else:
            out.print(idle_table(figures))
        return

    if null:
        null_rounds = rounds or (NULL_QUICK_ROUNDS if quick else NULL_ROUNDS)
        with _progress_bar(null_rounds) as step:
            overhead = measure_null(settings.seed, null_rounds, partial(step, "null"))
        if as_json:
            show_json({"seed": settings.seed, "overhead": msgspec.to_builtins(overhead)})
        else:
            out.print(overhead_table(overhead))
        return

    with _progress_bar(settings.steps) as step:
        report = asyncio.run(run_bench(settings, step))
    if plot is not None:
        plot_report(report, plot)
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        for table in report_tables(report):
            out.print(table)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _page_bytes(sizes: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) << 10 for size in _split(sizes))
    except ValueError as error:
        raise InvalidArgument(f"--sizes {sizes}: use whole KiB, such as 1,4,16") from error


@contextmanager
def _progress_bar(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that draws itself between measurements only: no thread of its own."""
    from rich.progress import Progress

    from kvxfer.cli.output import err

    with Progress(
        console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=steps)

        def step(measured: str) -> None:
            bar.update(task, advance=1, description=measured, refresh=True)

        yield step
