"""`kvxfer weights updates`: the updates of weights that the control plane knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kvxfer.cli.connection import ControlPlane
from kvxfer.cli.options import with_options
from kvxfer.cli.output import out, show_json, show_staleness
from kvxfer.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from rich.table import Table

    from kvxfer.weight_updates import WeightUpdate


@with_options
def updates(
    control_plane: ControlPlane,
    model: Annotated[str | None, typer.Option(help="Updates of this model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """List the updates under way and the last ones that ended, the newest first."""
    import msgspec

    from kvxfer.client import calls

    with control_plane.connect() as client:
        answer = client.ask(calls.weight_updates(model=model))
    found = answer.value
    if as_json:
        stale = {"stale_seconds": answer.stale_seconds}
        show_json({"updates": msgspec.to_builtins(found), **stale})
        return
    if found:
        out.print(_table(found, SYSTEM_CLOCK.unix()))
    else:
        out.print("no weight update is known")
    for update in found:
        if update.error is not None:
            said = f"{update.update_id}: {update.error.code}: {update.error.message}"
            out.print(said, highlight=False, markup=False, soft_wrap=True)
    show_staleness(answer.stale_seconds)


def _table(updates: Iterable[WeightUpdate], now: float) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for name in ("update", "model"):
        table.add_column(name, overflow="fold")
    for name in ("version", "state", "instances", "pause", "age"):
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for update in updates:
        pauses = [p.pause_seconds for p in update.instances if p.pause_seconds is not None]
        table.add_row(
            update.update_id,
            update.model,
            str(update.version),
            update.state,
            _states(update),
            f"{max(pauses):.3f} s" if pauses else "",
            f"{max(0.0, now - update.started_at):.1f} s",
        )
    return table


def _states(update: WeightUpdate) -> str:
    states = Counter(part.state.value for part in update.instances)
    return ", ".join(f"{count} {state}" for state, count in states.items())
