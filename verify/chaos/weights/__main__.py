"""Kills and freezes members of weight updates at every stage. Prints the outcomes.

Three training ranks push to two instances, one with two ranks and one with one. Half of the updates
come in waves. Exit code 1 if an instance serves half of an update, instances have different
versions, bytes differ from the reported version, a rank hangs, or an update is applied although a
member was lost before the votes.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import sys
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvxfer.weights.transfer.settings import Mode
from verify.arguments import above_zero
from verify.chaos.percentile import percentile

from .run import Round, run

KINDS: Final[tuple[tuple[str, Mode], ...]] = (
    ("local", "atomic"),
    ("tcp", "atomic"),
    ("local", "wave"),
    ("tcp", "wave"),
)
"""The fabrics, and the modes of their updates."""
_SHARES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def figures(rounds: list[Round], seed: int) -> dict[str, Any]:
    """Returns all that the table shows, for --json."""
    return {
        "seed": seed,
        "rounds": len(rounds),
        "rows": [
            {
                "act": act,
                "stage": stage,
                "rounds": len(found),
                "ended": dict(collections.Counter(each.ended for each in found)),
                "naming_seconds": {
                    name: round(percentile(named, share), 3) for name, share in _SHARES.items()
                }
                if (named := _named(found))
                else {},
            }
            for (act, stage), found in _rows(rounds)
        ],
        "broken": [line for each in rounds for line in each.broken],
    }


def _rows(rounds: list[Round]) -> list[tuple[tuple[str, str], list[Round]]]:
    found = collections.defaultdict[tuple[str, str], list[Round]](list)
    for each in rounds:
        found[each.fault.act, each.fault.stage].append(each)
    return sorted(found.items())


def _named(rounds: list[Round]) -> list[float]:
    return [each.naming_seconds for each in rounds if each.naming_seconds is not None]


def show(rounds: list[Round], console: Console) -> None:
    table = Table(
        title="Weight updates whose members break; seconds until the training ranks knew",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for name in ("act", "stage"):
        table.add_column(name, no_wrap=True)
    for name in ("rounds", "committed", "aborted", "coordinator lost", *_SHARES):
        table.add_column(name, justify="right")
    for (act, stage), found in [*_rows(rounds), (("all", ""), rounds)]:
        named = _named(found)
        committed = sum(each.ended == "committed" for each in found)
        aborted = sum(each.ended == "weight-update-aborted" for each in found)
        table.add_row(
            act,
            stage,
            str(len(found)),
            str(committed),
            str(aborted),
            str(len(found) - committed - aborted),
            *(f"{percentile(named, share):.2f}" if named else "-" for share in _SHARES.values()),
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos SUITE=weights", description=__doc__)
    parser.add_argument("--rounds", type=above_zero, default=300)
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true", help="print figures instead of a table")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    console = Console(stderr=options.json)
    console.print(f"seed {seed}", highlight=False)
    rounds: list[Round] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        for number, (fabric, mode) in enumerate(KINDS):
            share = (options.rounds + number) // len(KINDS)
            if share == 0:
                continue
            bar = progress.add_task(f"{fabric}, {mode}", total=share)
            rounds += asyncio.run(
                run(
                    fabric,
                    share,
                    random.Random(seed + number),
                    lambda _: progress.advance(bar),  # noqa: B023
                    mode=mode,
                )
            )
    if options.json:
        sys.stdout.write(json.dumps(figures(rounds, seed), indent=2) + "\n")
    else:
        show(rounds, console)
    broken = [f"{each.mode}, {each.fault}: {line}" for each in rounds for line in each.broken]
    for line in broken:
        console.print(f"[bold red]not held[/] {line}", highlight=False, soft_wrap=True)
    if not broken:
        happened = sum(each.happened for each in rounds)
        console.print(
            f"proved: {happened} faults in {len(rounds)} updates, 0 mixed versions, 0 wrong bytes",
            highlight=False,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
