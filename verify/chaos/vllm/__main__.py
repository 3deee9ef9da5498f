"""Runs a disaggregated vLLM under load, with faults. Prints the outcome of every request.

Clients leave, engines are killed and frozen, and the control plane is restarted. Every answer is
compared with an aggregated server's answer. Exit code 1 on a wrong token, a request that hangs, KV
blocks or reservations that are left over, or a failure that is named more than 1 s after its cause.
The cause is the fault, or the request if it came to a dead engine. For a request that waited for a
frozen decode engine, it is the moment when that engine was resumed. On a host with too few cores an
engine may get no core for as long as the peer timeout; requests that fail for that count as stalls.

Then bursts of 96 requests, 24 at once, go through a router that retries failures, while an engine
is frozen or without a fault. All must be answered correctly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from verify.chaos.percentile import percentile

from .acts import ACTS
from .load import Became
from .naming import Cause
from .run import Phase, run

_SHARES: Final = {"p50": 0.5, "p99": 0.99, "max": 1.0}


def figures(phases: list[Phase], seed: int) -> dict[str, Any]:
    """Returns all that the table shows, for --json."""
    return {
        "seed": seed,
        "phases": [
            {
                "fault": phase.name,
                "sent": len(phase.sent),
                **{str(became): phase.count(became) for became in Became},
                "stalls": phase.of(Cause.STALL),
                "naming_seconds": {
                    name: round(percentile([one.seconds for one in phase.naming], share), 3)
                    for name, share in _SHARES.items()
                    if phase.naming
                },
                "leaks": phase.leaks,
            }
            for phase in phases
        ],
        "broken": [line for phase in phases for line in phase.broken()],
    }


def show(phases: list[Phase], console: Console) -> None:
    table = Table(
        title="Disaggregated vLLM under load; seconds until a failure was named",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("fault", no_wrap=True)
    for column in (*Became, "leaks", *_SHARES):
        table.add_column(column, justify="right")

    def row(name: str, found: list[Phase]) -> None:
        naming = [one.seconds for phase in found for one in phase.naming]
        table.add_row(
            name,
            *(str(sum(phase.count(became) for phase in found)) for became in Became),
            str(sum(len(phase.leaks) for phase in found)),
            *(f"{percentile(naming, p):.2f}" if naming else "-" for p in _SHARES.values()),
        )

    for phase in phases:
        row(phase.name, [phase])
    row("all", phases)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos SUITE=vllm", description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--policy", choices=("fail", "recompute"), default="fail")
    parser.add_argument("--attempts", type=int, default=1, help="attempts of the router")
    parser.add_argument("--crowds", type=int, default=10, help="bursts of 96 requests, 24 at once")
    parser.add_argument("--fault", action="append", choices=list(ACTS), help="cause only these")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--logs", type=Path, default=None, help="keep the logs in this folder")
    parser.add_argument("--json", action="store_true", help="print figures instead of a table")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    console = Console(stderr=options.json)
    console.print(f"seed {seed}", highlight=False)
    phases = asyncio.run(
        run(
            count=options.requests,
            policy=options.policy,
            attempts=options.attempts,
            acts=options.fault or list(ACTS),
            crowds=options.crowds,
            rng=random.Random(seed),
            folder=options.logs,
            tell=lambda line: console.print(
                line, style="dim", highlight=False, markup=False, soft_wrap=True
            ),
        )
    )
    broken = [line for phase in phases for line in phase.broken()]
    if options.json:
        sys.stdout.write(json.dumps(figures(phases, seed), indent=2) + "\n")
    else:
        show(phases, console)
    for line in broken:
        console.print(f"[bold red]not held[/] {line}", highlight=False, soft_wrap=True)
    if not broken:
        ends = (f"{sum(p.count(became) for p in phases)} {became}" for became in Became)
        console.print(
            f"proved: of {sum(len(p.sent) for p in phases)} requests {', '.join(ends)}",
            highlight=False,
        )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
