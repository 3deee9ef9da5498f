"""`kvxfer simulate`: the performance of a fleet over a day, before there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.options import OptionsOf, with_options
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.settings import SimulationSettings

_LOAD = "Load"
_WORKERS = "Workers"
_OUTPUT = "Output"


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


@with_options
def simulate(
    *,
    asked: Annotated[
        dict[str, Any],
        OptionsOf(
            SimulationSettings,
            without=("policies",),
            ttft_target=typer.Option("--slo-ttft"),
            itl_target=typer.Option("--slo-itl"),
            hours=typer.Option(show_default="24", rich_help_panel=_LOAD),
            load=typer.Option(show_default="0.5", rich_help_panel=_LOAD),
            rate=typer.Option(rich_help_panel=_LOAD),
            prompt_tokens=typer.Option(show_default="2000", rich_help_panel=_LOAD),
            output_tokens=typer.Option(show_default="250", rich_help_panel=_LOAD),
            trace=typer.Option(rich_help_panel=_LOAD),
            heartbeat_seconds=typer.Option(rich_help_panel=_WORKERS),
            rack_size=typer.Option(show_default="all in one place", rich_help_panel=_WORKERS),
            gpus=typer.Option(rich_help_panel=_WORKERS),
            cost_per_hour=typer.Option(rich_help_panel=_WORKERS),
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="fixed, fixed=PREFILL:DECODE, scaling=default, scaling=FILE, pairing=FILE, or two "
            "of them with a comma between. May be repeated: policies are shown side by side.",
            show_default="fixed",
        ),
    ] = None,
    workers: Annotated[
        dict[str, Any],
        OptionsOf(
            WorkerModel,
            without=("prefill_overhead",),
            panel=_WORKERS,
            prefill_tokens_per_second=typer.Option("--prefill-speed", rich_help_panel=_WORKERS),
            batch=typer.Option(max=65_536, rich_help_panel=_WORKERS),
        ),
    ],
    prefill_overhead: Annotated[
        float,
        typer.Option(
            help="Seconds of each prompt in addition to --prefill-speed.", rich_help_panel=_WORKERS
        ),
    ] = 0.01,
    show_actions: Annotated[
        bool,
        typer.Option(
            "--actions", help="Show every scaling action with its reason.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Also draw the course of the day into this file (PNG, SVG, PDF).",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of it as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Simulate requests to a fleet: real pairing and autoscaling, virtual time, no workers.

    It prints the TTFT, ITL, goodput and cost to expect, under one policy or several side by side.
    Unlike `kvxfer scale replay`, which shows the autoscaler's decisions on average loads, it
    simulates requests.
    """
    from dataclasses import asdict

    from kvxfer.cli.output import out, show_json
    from kvxfer.cli.simulation_report import report
    from kvxfer.scheduler.simulator.plot import check_plot, plot_course
    from kvxfer.scheduler.simulator.run import simulate as run
    from kvxfer.scheduler.simulator.setup import prepare

    if plot is not None:
        check_plot(plot)
    simulation, policies = prepare(
        SimulationSettings(policies=tuple(policy or ["fixed"]), **asked),
        {"prefill_overhead": prefill_overhead, **workers},
    )
    with _progress_bar(len(simulation.windows()) * len(policies)) as step:
        results = [run(simulation, each, step) for each in policies]
    if plot is not None:
        plot_course(results, plot)
    if as_json:
        show_json({"workload": simulation.workload.name, "policies": [asdict(r) for r in results]})
        return
    for part in report(simulation, results, show_actions=show_actions):
        out.print(part, highlight=False)


@contextmanager
def _progress_bar(steps: int) -> Iterator[Callable[[], None]]:
    """Shows a bar on stderr if that is a terminal."""
    from rich.progress import Progress

    from kvxfer.cli.output import err

    with Progress(
        console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task("simulating", total=steps)

        def step() -> None:
            bar.update(task, advance=1, refresh=True)

        yield step
