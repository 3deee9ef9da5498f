"""The look of all benchmarks' tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from kvxfer.bench.machine import Machine
from kvxfer.bench.targets import Target, Verdict


def heading(started_at: str, machine: Machine, *about: str) -> Text:
    """Returns the time and the machine of a run, and a line for each part of `about`."""
    where = (
        f"{started_at}  {machine.cores} cores, {machine.cpu}, Linux {machine.kernel}; "
        f"load average before the run {machine.load_average:.1f}"
    )
    return Text("\n".join([where, *about]))


def columns(
    title: str | None,
    left: Sequence[str],
    right: Sequence[str],
    *,
    padding: tuple[int, int] = (0, 1),
    no_wrap: bool = False,
    caption: str | None = None,
) -> Table:
    """Returns an empty table: columns of text, then columns of figures."""
    return Table(
        *(Column(heading, no_wrap=no_wrap) for heading in left),
        *(Column(heading, justify="right", no_wrap=no_wrap) for heading in right),
        title=title,
        title_justify="left",
        padding=padding,
        caption=caption,
    )


def judged(figure: float, target: Target, text: str) -> Text:
    """Returns `text`, which shows the figure, in green if the target is met, in red if missed."""
    return Text(text, style="green" if target.met(figure) else "bold red")


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    table = columns("Targets", ("target", "measured", "against"), ("figure", "target"))
    for each in verdicts:
        figure, target = each.figure, each.target
        text = f"{figure:.1f} {target.unit}" if target.unit else f"{figure:.2f}"
        cells = (target.name, target.measured, target.against)
        table.add_row(*cells, judged(figure, target, text), str(target))
    return table
