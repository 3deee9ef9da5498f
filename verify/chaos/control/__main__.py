"""Runs a whole cluster under load and kills, drains, adds and moves some of its processes.

The cluster has three replicas of the control plane over Redis, six workers and the router. Redis is
one server that loses its data, a master and its replica behind a Sentinel, or a Redis Cluster; by
default one after another. Its user may access only the keys of the fleet. Only in the first case
are the replicas behind one address.

Prints the outcome of every request. Exit code 1 on a wrong answer, on a request more than 5 s
slower than the slowest one of the calm phase (plus the time of a fail-over), and on a reservation
or KV block that is not given back. A stream may fail only if its decode worker was killed after the
first token, and with --continue-streams not even then; any other failure is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import sys

import torch
from rich.console import Console
from rich.table import Table

from verify.chaos.control.cluster import REDIS
from verify.chaos.control.run import Outcome, Phase, run

_FAILURES_TOLD = 10


def show(outcome: Outcome, redis: str, console: Console) -> bool:
    """Prints the table. Returns whether every promise was kept."""
    table = Table(title=f"A cluster under load, Redis: {redis}", title_justify="left")
    table.add_column("act", no_wrap=True)
    for column in ("whole s", "sent", "right", "wrong", "retries", "failed", "max s"):
        table.add_column(column, justify="right")
    for phase in outcome.phases:
        table.add_row(
            phase.name,
            f"{phase.seconds:.1f}",
            *(str(n) for n in (len(phase.sent), phase.right, phase.wrong, phase.retries)),
            str(len(phase.failed)),
            f"{phase.slowest:.2f}",
        )
    table.add_section()
    every = Phase("all", [sent for phase in outcome.phases for sent in phase.sent])
    retries = sum(phase.retries for phase in outcome.phases)
    table.add_row(
        every.name,
        None,
        *(str(number) for number in (len(every.sent), every.right, every.wrong, retries)),
        str(len(every.failed)),
        f"{every.slowest:.2f}",
    )
    console.print(table)
    failures = collections.Counter(
        f"{phase.name}: failed {'after its first token' if sent.tokens else 'without a token'}: "
        f"{sent.failure}"
        for phase in outcome.phases
        for sent in phase.failed
    )
    for line, number in failures.most_common(_FAILURES_TOLD):
        console.print(f"[dim]{number} x {line}", highlight=False, soft_wrap=True)
    broken = outcome.broken()
    for line in broken:
        console.print(f"[bold red]not held[/] {line}", highlight=False, soft_wrap=True)
    if not broken:
        console.print(
            f"proved: of {len(every.sent):,} requests of a cluster {every.right:,} right, 0 wrong, "
            f"Redis: {redis}",
            highlight=False,
        )
    return not broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos SUITE=control", description=__doc__)
    parser.add_argument(
        "--rate",
        type=float,
        default=None,
        help="requests per second; by default 0.4 of the cluster's capacity",
    )
    parser.add_argument("--redis", choices=REDIS, action="append", help="by default all")
    parser.add_argument(
        "--continue-streams",
        action="store_true",
        help="the router continues the streams of a killed decode worker",
    )
    parser.add_argument("--calm", type=float, default=20.0, help="seconds before the first act")
    parser.add_argument("--gap", type=float, default=4.0, help="seconds after each act")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    console = Console()
    console.print(f"seed {seed}", highlight=False)
    # The number of threads decides the last bits of sums, so all processes have the same.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    torch.set_num_threads(threads)

    def tell(line: str) -> None:
        console.print(f"[dim]{line}", highlight=False)

    held = True
    for redis in options.redis or REDIS:
        outcome = asyncio.run(
            run(
                redis=redis,
                continue_streams=options.continue_streams,
                rate=options.rate,
                calm_seconds=options.calm,
                gap_seconds=options.gap,
                threads=threads,
                rng=random.Random(seed),
                tell=tell,
            )
        )
        held = show(outcome, redis, console) and held
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
