"""`kvxfer simulate`: what a fleet would make of a day, before there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

_LOAD = "Load"
_WORKERS = "Workers"
_OUTPUT = "Output"


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)


def simulate(
    instances: Annotated[
        int, typer.Option(help="Instances of the fleet.", min=2, max=100_000)
    ] = 100,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="fixed, fixed=PREFILL:DECODE, scaling=default, scaling=FILE, pairing=FILE, or two "
            "of them with a comma. Several times: side by side.",
            show_default="fixed",
        ),
    ] = None,
    slo_ttft: Annotated[float, typer.Option(help="Target of the TTFT, seconds.")] = 1.0,
    slo_itl: Annotated[float, typer.Option(help="Target of the ITL, seconds.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Draws the requests.", min=0)] = 0,
    detail: Annotated[
        int,
        typer.Option(
            help="Requests that are simulated one by one at most; of more, windows are.", min=1000
        ),
    ] = 400_000,
    hours: Annotated[
        float | None,
        typer.Option(
            help="Length of the generated day.",
            show_default="24",
            max=24 * 31,
            rich_help_panel=_LOAD,
        ),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option(
            help="Mean load, as a part of what the instances can serve.",
            show_default="0.5",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Mean load in requests/s, instead of --load.", rich_help_panel=_LOAD),
    ] = None,
    prompt_tokens: Annotated[
        float | None,
        typer.Option(help="Mean prompt.", show_default="2000", min=1, rich_help_panel=_LOAD),
    ] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option(help="Mean answer.", show_default="250", min=1, rich_help_panel=_LOAD),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests of a file instead: a CSV as of Azure's LLM inference traces, or JSON "
            "lines as of Mooncake.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    prefill_speed: Annotated[
        float, typer.Option(help="Tokens/s of a prefill instance.", rich_help_panel=_WORKERS)
    ] = 20_000.0,
    prefill_overhead: Annotated[
        float, typer.Option(help="Seconds of a prompt beside that.", rich_help_panel=_WORKERS)
    ] = 0.01,
    itl_base: Annotated[
        float, typer.Option(help="Seconds of a decode step.", rich_help_panel=_WORKERS)
    ] = 0.008,
    itl_per_request: Annotated[
        float,
        typer.Option(help="Seconds more per request in the batch.", rich_help_panel=_WORKERS),
    ] = 0.0004,
    batch: Annotated[
        int, typer.Option(help="Requests in a batch at most.", max=65_536, rich_help_panel=_WORKERS)
    ] = 256,
    kv_blocks: Annotated[
        int, typer.Option(help="KV blocks of 16 tokens.", rich_help_panel=_WORKERS)
    ] = 20_000,
    kv_bytes_per_token: Annotated[
        float, typer.Option(help="Bytes of KV cache per token.", rich_help_panel=_WORKERS)
    ] = 131_072.0,
    nics: Annotated[int, typer.Option(help="NICs of an instance.", rich_help_panel=_WORKERS)] = 1,
    nic_gb_per_second: Annotated[
        float, typer.Option(help="GB/s of a NIC.", rich_help_panel=_WORKERS)
    ] = 42.5,
    start_seconds: Annotated[
        float,
        typer.Option(help="From asked for to ready, when scaling.", rich_help_panel=_WORKERS),
    ] = 60.0,
    heartbeat_seconds: Annotated[
        float,
        typer.Option(help="Between heartbeats: a third of the lease.", rich_help_panel=_WORKERS),
    ] = 2.0,
    rack_size: Annotated[
        int | None,
        typer.Option(
            help="Instances per rack, for the distances of pairing.",
            show_default="all in one place",
            min=1,
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    gpus: Annotated[
        float, typer.Option(help="GPUs of an instance.", rich_help_panel=_WORKERS)
    ] = 1.0,
    cost_per_hour: Annotated[
        float, typer.Option(help="What a GPU costs in an hour.", min=0, rich_help_panel=_WORKERS)
    ] = 0.0,
    show_actions: Annotated[
        bool,
        typer.Option(
            "--actions", help="Show every scaling action with its reason.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw the course of the day into this file (PNG, SVG, PDF), too.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all of it as JSON.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Run requests through a fleet on paper: real pairing and autoscaling, virtual time.

    Says what TTFT, ITL, goodput and cost would be, under one policy or several side by side. Unlike
    `kvxfer scale replay`, which shows the autoscaler's decisions on average loads, it simulates
    requests.
    """
    from dataclasses import asdict

    from kvxfer.cli.output import out, show_json
    from kvxfer.cli.simulation_report import report
    from kvxfer.scheduler.simulator.plot import check_plot, plot_course
    from kvxfer.scheduler.simulator.run import simulate as run
    from kvxfer.scheduler.simulator.setup import Asked, prepare

    if plot is not None:
        check_plot(plot)
    simulation, policies = prepare(
        Asked(
            instances=instances,
            policies=tuple(policy or ["fixed"]),
            hours=hours,
            load=load,
            rate=rate,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            trace=trace,
            ttft_target=slo_ttft,
            itl_target=slo_itl,
            detail=detail,
            heartbeat_seconds=heartbeat_seconds,
            rack_size=rack_size,
            gpus=gpus,
            cost_per_hour=cost_per_hour,
            seed=seed,
        ),
        {
            "prefill_tokens_per_second": prefill_speed,
            "prefill_overhead": prefill_overhead,
            "itl_base": itl_base,
            "itl_per_request": itl_per_request,
            "batch": batch,
            "kv_blocks": kv_blocks,
            "kv_bytes_per_token": kv_bytes_per_token,
            "nics": nics,
            "nic_gb_per_second": nic_gb_per_second,
            "start_seconds": start_seconds,
        },
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
    """A bar on stderr, where that is a terminal."""
    from rich.progress import Progress

    from kvxfer.cli.output import err

    with Progress(
        console=err, auto_refresh=False, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task("simulating", total=steps)

        def step() -> None:
            bar.update(task, advance=1, refresh=True)

        yield step
