"""Kills and freezes ranks of MoE groups at every phase of a step. Prints the outcomes.

Groups have two to eight processes, over shared memory, over tcp, and on two hosts (network
namespaces). Exit code 1 if a rank that did not break is reported missing, a sum differs from the
sum of the reported contributions, a row differs from its source's, a rank hangs, or a frozen rank
is not told that it is excluded.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from verify.arguments import above_zero
from verify.chaos.link import Host, link, why_no_links
from verify.chaos.percentile import percentile

from .run import Round, choose, run

FABRICS: Final = ("local", "tcp", "hosts")
_SHARES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}
_FEW_RANKS: Final = 4


@dataclass
class _Row:
    """The faults of one act and phase. `seconds` are the times until a survivor knew of the fault
    ("named"), and until it ran a step in a view without the rank ("without")."""

    times: int = 0
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: collections.defaultdict[str, list[float]](list)
    )

    def shares(self, what: str) -> dict[str, float]:
        found = self.seconds[what]
        return {name: percentile(found, share) for name, share in _SHARES.items()} if found else {}


def _rows(rounds: list[Round]) -> list[tuple[str, str, _Row]]:
    rows: dict[tuple[str, str], _Row] = collections.defaultdict(_Row)
    for each in rounds:
        size = f"all, {'2 to 4' if each.setting.ranks <= _FEW_RANKS else '5 to 8'} ranks"
        for rank in each.happened:
            act = _act(each, each.faults[rank].act)
            for phase in (each.faults[rank].phase, size):
                rows[act, phase].times += 1
        for what, found in each.seconds.items():
            for act, phase, seconds in found:
                for row in (phase, size):
                    rows[_act(each, act), row].seconds[what].append(seconds)
    return [(*key, rows[key]) for key in sorted(rows)]


def _act(round_: Round, act: str) -> str:
    """Returns the name of the act in the table. Faults beside a frozen rank have a separate name:
    a step that waits for the frozen rank ends late, and then it names the other rank late too."""
    frozen = sum(round_.faults[rank].act == "freeze" for rank in round_.happened)
    return f"{act}, and freeze another" if frozen > (act == "freeze") else act


def figures(rounds: list[Round], seed: int) -> dict[str, Any]:
    """Returns all that the table shows, for --json."""
    return {
        "seed": seed,
        "rounds": len(rounds),
        "without_fault": sum(not each.faults for each in rounds),
        "rows": [
            {
                "act": act,
                "phase": phase,
                "times": row.times,
                "named_seconds": row.shares("named"),
                "without_seconds": row.shares("without"),
            }
            for act, phase, row in _rows(rounds)
        ],
        "broken": [line for each in rounds for line in each.broken],
    }


def show(rounds: list[Round], console: Console) -> None:
    table = Table(
        title="Ranks of MoE groups that break; seconds until a survivor knew of it, and until it "
        "ran a step in a view without them",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for name in ("act", "phase"):
        table.add_column(name, no_wrap=True)
    for name in ("times", *(f"knew {share}" for share in _SHARES), *_SHARES):
        table.add_column(name, justify="right")
    for act, phase, row in _rows(rounds):
        shares = [row.shares(what).get(name) for what in ("named", "without") for name in _SHARES]
        shown = ("-" if share is None else f"{share:.3f}" for share in shares)
        table.add_row(act, phase, str(row.times), *shown)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos SUITE=moe", description=__doc__)
    # Some rounds have no fault, some have two: 350 rounds have at least 300 faults.
    parser.add_argument("--rounds", type=above_zero, default=350)
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true", help="print figures instead of a table")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    console = Console(stderr=options.json)
    console.print(f"seed {seed}", highlight=False)
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        fabrics = FABRICS if hosts else FABRICS[:2]
        rounds = [
            choose(fabrics[number % len(fabrics)], rng, hosts) for number in range(options.rounds)
        ]
        _run_all(rounds, console)
    if options.json:
        sys.stdout.write(json.dumps(figures(rounds, seed), indent=2) + "\n")
    else:
        show(rounds, console)
    broken = sum(bool(each.broken) for each in rounds)
    happened = sum(len(each.happened) for each in rounds)
    proved = "" if broken else "proved: "
    console.print(
        f"{proved}{happened} faults in {len(rounds)} groups, {broken} promises broken",
        highlight=False,
    )
    return 1 if broken else 0


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, ...]]:
    """Makes two joined network namespaces; gives none if this process may not make them."""
    if why_no_links() is not None:
        yield ()
        return
    with asyncio.Runner() as runner:
        joined = link()
        made = runner.run(joined.__aenter__())
        try:
            yield made.hosts
        finally:
            runner.run(joined.__aexit__(None, None, None))


def _run_all(rounds: list[Round], console: Console) -> None:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        auto_refresh=False,  # a refresh thread would be forked
    ) as progress:
        bar = progress.add_task("rounds", total=len(rounds))
        for each in rounds:
            run(each)
            for line in each.broken:
                progress.console.print(
                    f"[bold red]not held[/] {each.setting}, {each.faults}: {line}"
                )
            progress.update(bar, advance=1, refresh=True)


if __name__ == "__main__":
    sys.exit(main())
