"""`kvxfer bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvxfer.errors import InvalidArgument

if TYPE_CHECKING:
    from kvxfer.bench.settings import Settings

IDLE_SECONDS = 10.0
NULL_ROUNDS, NULL_QUICK_ROUNDS = 500, 20
CASES = "tcp,local,local-cma"
PORT: Final = 7480

_PANEL: Final = "Two hosts"
_OF_SERVE: Final = {"host", "port", "once", "gpu", "cluster_key_file"}
_OF_TO: Final = {
    *("sizes", "fabrics", "rounds", "total", "pool", "seed", "quick", "as_json"),
    *("pull", "gpu", "cluster_key_file"),
}


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    *,
    context: typer.Context,
    sizes: Annotated[
        str | None,
        typer.Option(help="Page sizes in KiB.", show_default="1,4,16,64,256; 1,64 if quick"),
    ] = None,
    fabrics: Annotated[
        str | None,
        typer.Option(
            help="Fabrics to measure; local-cma is local from memory that it did not allocate.",
            show_default=f"{CASES}; with --to those of verbs,ofi,tcp that both hosts have",
        ),
    ] = None,
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
        int | None,
        typer.Option(help="Seed that draws the pages.", min=0, show_default="random, printed"),
    ] = None,
    idle: Annotated[
        bool, typer.Option("--idle", help="Measure only the cost of a connected, idle engine.")
    ] = False,
    null: Annotated[
        bool,
        typer.Option(
            "--null", help="Measure only the engine's own time per page, over a NIC without delay."
        ),
    ] = False,
    nic: Annotated[
        str | None,
        typer.Option(
            help="Show what bounds pages of each size on this NIC: cx7 or efa-p5en. The engine's "
            "own time is measured as with --null, the rest comes from published figures."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds instead of minutes: a smoke test.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw throughput over page size into this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every figure and sample as JSON.")
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Receive what another host sends with --to, from one client after the other, "
            "until Ctrl-C.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            help="With --serve: address to listen on and to announce.", rich_help_panel=_PANEL
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="With --serve: TCP port to listen on; 0 takes any free one.",
            min=0,
            max=65535,
            rich_help_panel=_PANEL,
        ),
    ] = PORT,
    once: Annotated[
        bool,
        typer.Option("--once", help="With --serve: end after one client.", rich_help_panel=_PANEL),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Measure from here to the host that runs --serve.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    pull: Annotated[
        bool,
        typer.Option(
            "--pull",
            help="With --to: also ask for one NIC's cable to be pulled, and show the effect.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    gpu: Annotated[
        int | None,
        typer.Option(
            help="With --serve or --to: receive into, or send from, memory of this GPU (CUDA's "
            "number in this process).",
            min=0,
            show_default="host memory",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the cluster key of both hosts; without it, KVXFER_CLUSTER_KEY.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
) -> None:
    """Measure the engine between two processes, and the limits of this host.

    Each figure is shown with its limit, measured in the same run: raw TCP, memcpy of the same
    pages, or process_vm_readv. Every byte moved is verified. With --serve on one host and --to
    on another, it measures between the two.
    """
    import asyncio
    import secrets
    from functools import partial

    import msgspec

    _check_options(context)
    if serve:
        _serve(host, port, gpu, once, cluster_key_file)
        return

    from kvxfer.bench.cases import cases_by_name
    from kvxfer.bench.null import measure_null, measure_scatter
    from kvxfer.bench.plot import check_plot_path, plot_report
    from kvxfer.bench.run import run_bench, run_idle
    from kvxfer.bench.settings import full_settings, quick_settings
    from kvxfer.bench.table import idle_table, overhead_table, report_tables, scatter_table
    from kvxfer.cli.output import out, show_json

    # Between two hosts fabrics are measured, not cases.
    cases = () if to is not None else cases_by_name(_split(CASES if fabrics is None else fabrics))
    settings = (quick_settings if quick else full_settings)(
        cases=cases,
        seed=secrets.randbits(32) if seed is None else seed,
        request_bytes=total << 20,
        page_bytes=None if sizes is None else _page_bytes(sizes),
        pool_bytes=None if pool is None else pool << 20,
        rounds=rounds,
    )
    if to is not None:
        _measure_to(to, settings, fabrics, gpu, pull, cluster_key_file, as_json=as_json)
        return
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

    if nic is not None:
        _show_bounds(nic, settings.seed, rounds, quick, as_json=as_json)
        return

    if null:
        null_rounds = rounds or (NULL_QUICK_ROUNDS if quick else NULL_ROUNDS)
        with _progress_bar(2 * null_rounds) as step:
            overhead = measure_null(settings.seed, null_rounds, partial(step, "pages"))
            scatter = measure_scatter(null_rounds, partial(step, "scatter"))
        if as_json:
            null_figures = {"overhead": overhead, "scatter": scatter}
            show_json({"seed": settings.seed, **msgspec.to_builtins(null_figures)})
        else:
            out.print(overhead_table(overhead))
            out.print(scatter_table(scatter))
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


def _show_bounds(name: str, seed: int, rounds: int | None, quick: bool, *, as_json: bool) -> None:
    from functools import partial

    import msgspec

    from kvxfer.bench.nic_bounds import NICS, measure_bounds
    from kvxfer.bench.table import nic_table
    from kvxfer.cli.output import out, show_json

    nic = NICS.get(name)
    if nic is None:
        raise InvalidArgument(f"--nic {name!r} is not known; choose from {', '.join(NICS)}")
    rounds = rounds or (NULL_QUICK_ROUNDS if quick else NULL_ROUNDS)
    with _progress_bar(rounds) as step:
        bounds = measure_bounds(nic, seed, rounds, partial(step, nic.name))
    if as_json:
        show_json(
            {"seed": seed, "nic": msgspec.to_builtins(nic), "bounds": msgspec.to_builtins(bounds)}
        )
        return
    for part in nic_table(nic, bounds):
        out.print(part)


def _check_options(context: typer.Context) -> None:
    """Raises InvalidArgument for options that do not go together."""
    given = {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }
    if "serve" in given:
        wrong, fault = given - _OF_SERVE - {"serve"}, "has no meaning with --serve"
    elif "to" in given:
        wrong, fault = given - _OF_TO - {"to"}, "has no meaning with --to"
    else:
        wrong, fault = given & (_OF_SERVE | {"pull"}), "has no meaning without --serve or --to"
    for name in sorted(wrong):
        option = "--json" if name == "as_json" else f"--{name.replace('_', '-')}"
        raise InvalidArgument(f"{option} {fault}; leave it out")


def _serve(
    host: str, port: int, gpu: int | None, once: bool, cluster_key_file: Path | None
) -> None:
    import asyncio
    import contextlib
    import socket

    from kvxfer.addresses import EVERY_ADDRESS, host_and_port
    from kvxfer.bench.host_server import serve_hosts
    from kvxfer.cli.output import out
    from kvxfer.cluster_key import read_cluster_key

    def tell(line: str) -> None:
        out.print(line, soft_wrap=True, highlight=False, markup=False)
        out.file.flush()

    def announce(port: int) -> None:
        name = socket.gethostname() if host in EVERY_ADDRESS else host
        where = host_and_port(name, port)
        tell(f"on the other host, with the same cluster key: kvxfer bench --to {where}")

    with contextlib.suppress(KeyboardInterrupt):  # the way to end it
        asyncio.run(
            serve_hosts(
                read_cluster_key(cluster_key_file),
                host,
                port,
                gpu=gpu,
                once=once,
                announce=announce,
                tell=tell,
            )
        )


def _measure_to(
    to: str,
    settings: Settings,
    fabrics: str | None,
    gpu: int | None,
    pull: bool,
    cluster_key_file: Path | None,
    *,
    as_json: bool,
) -> None:
    import asyncio

    import msgspec

    from kvxfer.bench.host_client import Ask, Server, measure_host, named_fabrics
    from kvxfer.bench.host_report import host_tables
    from kvxfer.cli.output import err, out, show_json
    from kvxfer.cluster_key import read_cluster_key

    named = None if fabrics is None else named_fabrics(_split(fabrics))
    key, server = read_cluster_key(cluster_key_file), Server.parse(to, PORT)

    def ask_pull(text: str) -> None:
        err.print(text, soft_wrap=True, highlight=False, style="bold")

    with _progress_bar(None) as step:
        ask = Ask(progress=step, pull=ask_pull if pull else None)
        report = asyncio.run(measure_host(server, key, settings, named, gpu, ask))
    if as_json:
        show_json(msgspec.to_builtins(report))
    else:
        for table in host_tables(report):
            out.print(table)


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _page_bytes(sizes: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) << 10 for size in _split(sizes))
    except ValueError as error:
        raise InvalidArgument(f"--sizes {sizes}: use whole KiB, such as 1,4,16") from error


@contextmanager
def _progress_bar(steps: int | None) -> Iterator[Callable[[str], None]]:
    """Shows a bar on stderr that is drawn only between measurements, without a thread. None: the
    number of steps is unknown."""
    from rich.progress import Progress

    from kvxfer.cli.output import err

    with Progress(
        console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=steps)

        def step(measured: str) -> None:
            bar.update(task, advance=1, description=measured, refresh=True)

        yield step
