"""`make simulate-moe`: many seeds; `--seed N --trace` replays one.

Exit code 1 where a promise was broken.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time

from rich.console import Console
from rich.table import Table

from verify.arguments import above_zero

from .defects import DEFECTS, NONE
from .fate import FAULTS, simulate

_BATCH = 50
_SHOWN = 20


def _batch(seeds: range) -> tuple[collections.Counter[str], list[tuple[int, str]]]:
    """What happened in some seeds, and which of them failed why."""
    counts: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in seeds:
        outcome = simulate(seed)
        counts += outcome.counts
        if outcome.violation:
            failed.append((seed, outcome.violation))
    return counts, failed


def _many(first: int, seeds: int, jobs: int, console: Console) -> int:
    end = first + seeds
    batches = [range(begin, min(begin + _BATCH, end)) for begin in range(first, end, _BATCH)]
    counts: collections.Counter[str] = collections.Counter()
    failed: list[tuple[int, str]] = []
    begun = time.perf_counter()
    with multiprocessing.Pool(jobs) as pool:
        for happened, violations in pool.imap_unordered(_batch, batches):
            counts += happened
            failed += violations
    per_second = seeds / (time.perf_counter() - begun)
    table = Table(title=f"{seeds:,} seeds, {per_second:.1f} per second")
    table.add_column("what happened")
    table.add_column("times", justify="right")
    for names in (FAULTS, sorted(counts.keys() - set(FAULTS))):
        for name in names:
            table.add_row(name, f"{counts[name]:,}")
        table.add_section()
    console.print(table)
    for seed, violation in sorted(failed)[:_SHOWN]:
        console.print(f"[red]seed {seed}[/]: {violation}", highlight=False)
        replay = f".venv/bin/python -m verify.moe --seed {seed} --trace"
        console.print(f"  replay: {replay}", highlight=False)
    proved = "" if failed else "proved: "
    console.print(f"{proved}{len(failed)} of {seeds:,} seeds failed")
    return 1 if failed else 0


def _one(seed: int, defect: str, trace: bool, console: Console) -> int:
    outcome = simulate(seed, DEFECTS[defect] if defect else NONE, trace=trace)
    for line in outcome.trace:
        print(line)
    console.print(outcome.violation or "everything held", highlight=False)
    return 1 if outcome.violation else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m verify.moe", description=__doc__)
    parser.add_argument("--seeds", type=above_zero, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=above_zero, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print the events of the one")
    parser.add_argument("--defect", choices=sorted(DEFECTS), default="", help="inject this into it")
    options = parser.parse_args()
    console = Console()
    if options.seed is not None:
        return _one(options.seed, options.defect, options.trace, console)
    return _many(options.first, options.seeds, options.jobs, console)


if __name__ == "__main__":
    sys.exit(main())
