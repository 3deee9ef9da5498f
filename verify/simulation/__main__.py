"""`make simulate`: many seeds on all cores; `--seed N --trace` replays one.

Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from verify.arguments import above_zero

from .defects import DEFECTS, NONE
from .fate import FAULTS, REQUEST_FAULTS, simulate

_BATCH = 50
_SHOWN = 20


def _batch(seeds: range) -> tuple[int, collections.Counter[str], list[tuple[int, str]]]:
    """How many seeds, what happened in them, and which of them failed why."""
    counts: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in seeds:
        outcome = simulate(seed)
        counts += outcome.counts
        if outcome.violation:
            failed.append((seed, outcome.violation))
    return len(seeds), counts, failed


def _many(first: int, seeds: int, jobs: int, console: Console) -> dict[str, Any]:
    batches = [
        range(begin, min(begin + _BATCH, first + seeds))
        for begin in range(first, first + seeds, _BATCH)
    ]
    counts: collections.Counter[str] = collections.Counter()
    failed: list[tuple[int, str]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    begun = time.perf_counter()
    with (
        multiprocessing.Pool(jobs) as pool,
        Progress(*columns, TimeRemainingColumn(), console=console) as progress,
    ):
        bar = progress.add_task("seeds", total=seeds)
        results: Iterable[Any] = pool.imap_unordered(_batch, batches)
        for done, happened, violations in results:
            counts += happened
            failed += violations
            for seed, violation in violations:
                progress.console.print(f"[red]seed {seed}[/]: {violation}", highlight=False)
            progress.update(bar, advance=done, description=f"{len(failed)} failed")
    seconds = time.perf_counter() - begun
    return {
        "first": first,
        "seeds": seeds,
        "seconds": round(seconds, 1),
        "seeds_per_second": round(seeds / seconds, 1),
        "failed": dict(sorted(failed)),
        "counts": dict(sorted(counts.items())),
    }


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{found['seeds']} seeds, {found['seeds_per_second']} per second")
    table.add_column("what happened")
    table.add_column("times", justify="right")
    counts = found["counts"]
    faults = [*FAULTS, *REQUEST_FAULTS]
    for names in (faults, sorted(counts.keys() - set(faults))):
        for name in names:
            table.add_row(name, f"{counts.get(name, 0):,}")
        table.add_section()
    console.print(table)
    for seed, violation in list(found["failed"].items())[:_SHOWN]:
        console.print(f"[red]seed {seed}[/]: {violation}", highlight=False)
        replay = f".venv/bin/python -m verify.simulation --seed {seed} --trace"
        console.print(f"  replay: {replay}", highlight=False)
    proved = "" if found["failed"] else "proved: "
    console.print(f"{proved}{len(found['failed'])} of {found['seeds']:,} seeds failed")


def _one(seed: int, defect: str, trace: bool, console: Console) -> int:
    outcome = simulate(seed, DEFECTS[defect] if defect else NONE, trace=trace)
    for line in outcome.trace:
        print(line)
    console.print(outcome.violation or "everything held", highlight=False)
    return 1 if outcome.violation else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.simulation", description=__doc__)
    parser.add_argument("--seeds", type=above_zero, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=above_zero, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print the events of the one")
    parser.add_argument("--defect", choices=sorted(DEFECTS), default="", help="inject this into it")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    if options.seed is not None:
        return _one(options.seed, options.defect, options.trace, console)
    found = _many(options.first, options.seeds, options.jobs, console)
    if options.json:
        print(json.dumps(found))
    else:
        _show(found, console)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
