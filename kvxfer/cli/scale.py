"""`kvxfer scale`: what the autoscaler would do now, and what it would have done under a load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.scaling import RoleDecision, ScalePlan
    from kvxfer.scheduler.scaling.replay import Replay, ReplayStep

_COLOURS = {"up": "green", "down": "yellow", "hold": "dim"}


def register(app: typer.Typer) -> None:
    scale = typer.Typer(
        help="Show what the autoscaler would do, now or under a load trace.", no_args_is_help=True
    )
    scale.command("plan")(plan)
    scale.command("replay")(replay)
    app.add_typer(scale, name="scale")


@with_options
def plan(
    control_plane: ControlPlane,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show what the control plane's autoscaler would do now, and why. Nothing is applied."""
    with control_plane.connect() as client:
        now = client.scale_plan()
    if as_json:
        show_json(msgspec.to_builtins(now))
        return
    out.print(_plan_table(now))
    who = "this replica applies it" if now.leads else "this replica does not apply it"
    out.print(
        f"policy {now.policy}, backend {now.backend}: "
        f"{who if now.backend != 'none' else 'a dry run'}; "
        f"load observed for {now.observed_seconds:.0f} s",
        highlight=False,
    )


def replay(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A load trace (CSV), or a bundled one: step, day, burst."
        ),
    ],
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The scaling file, YAML or TOML; its worker_model describes the workers.",
            show_default="the one of the bundled traces",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Also show the decisions that change nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Run a load trace through the autoscaler's decisions, in virtual time and without workers.

    Prints each decision with its reasons, and how well the targets were kept.
    """
    from kvxfer.scheduler.scaling.policy_file import read_bundled_policy, read_scaling_file
    from kvxfer.scheduler.scaling.replay import replay as run
    from kvxfer.scheduler.scaling.trace import read_trace

    scaling = read_bundled_policy() if policy is None else read_scaling_file(policy)
    trace = read_trace(file)
    result = run(trace, scaling, scaling.worker_model)
    steps = [step for step in result.steps if every or step.changes]
    if as_json:
        summary = asdict(result)
        summary["steps"] = [_step(step) for step in steps]
        show_json({"trace": trace.name, **summary})
        return
    out.print(_replay_table(trace.name, steps))
    for line in _summary(result):
        out.print(line, highlight=False)


def _step(step: ReplayStep) -> dict[str, Any]:
    document = cast(dict[str, Any], msgspec.to_builtins(step))
    return {**document, **document.pop("decision")}


def _plan_table(now: ScalePlan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="scaling plan", title_justify="left", box=None)
    for header in ("role", "now", "wanted"):
        table.add_column(header, justify="left" if header == "role" else "right")
    table.add_column("reasons", overflow="fold")
    for decision in (now.prefill, now.decode):
        reasons = [demand.because for demand in decision.demands]
        reasons += [clip.because for clip in decision.clips]
        reasons += [f"silent: {why}" for why in decision.silent]
        table.add_row(
            decision.role.value,
            str(decision.current),
            Text(str(decision.wanted), style=_COLOURS[decision.direction]),
            Text("\n".join(reasons)),
        )
    return table


def _replay_table(name: str, steps: list[ReplayStep]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"decisions under {name}", title_justify="left", box=None)
    for header in ("at", "requests/s", "TTFT", "ITL"):
        table.add_column(header, justify="right", no_wrap=True)
    for header in ("role", "workers"):
        table.add_column(header, no_wrap=True)
    table.add_column("because", overflow="fold")
    for step in steps:
        when = (
            _clock(step.at),
            f"{step.requests_per_second:g}",
            f"{step.ttft:.2f} s",
            f"{step.itl * 1000:.1f} ms",
        )
        for decision in _shown(step):
            table.add_row(
                *when,
                decision.role.value,
                Text(f"{decision.current} → {decision.wanted}", style=_COLOURS[decision.direction]),
                Text(decision.because),
            )
            when = ("", "", "", "")
    return table


def _shown(step: ReplayStep) -> Iterator[RoleDecision]:
    for decision in (step.decision.prefill, step.decision.decode):
        if decision.direction != "hold" or not step.changes:
            yield decision


def _summary(result: Replay) -> Iterator[str]:
    yield (
        f"{len(result.steps)} decisions, {sum(step.changes for step in result.steps)} of them "
        f"change something; {result.requests:,.0f} requests"
    )
    for target, part in (("TTFT", result.within_ttft), ("ITL", result.within_itl)):
        if part is not None:
            yield f"{part:.1%} of the requests came while the {target} target was kept"
    yield (
        f"{result.prefill_worker_hours:.1f} worker hours of prefill, "
        f"{result.decode_worker_hours:.1f} of decode"
    )


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
