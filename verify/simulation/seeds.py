"""The program of a simulation: runs many seeds in several processes, or one seed event by event.

Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from verify.arguments import above_zero

_BATCH: Final = 50
_SHOWN: Final = 20


class Outcome(Protocol):
    """The outcome of one seed. `violation` is empty if every promise was kept."""

    @property
    def violation(self) -> str: ...
    @property
    def counts(self) -> collections.Counter[str]: ...
    @property
    def trace(self) -> Sequence[str]: ...


class Simulate(Protocol):
    """A function at module level, so that other processes can call it."""

    def __call__(self, seed: int, defects: Any = ..., *, trace: bool = ...) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulation and its command line. `program` is the module after `python -m`; `seeds` and
    `jobs` are defaults; `faults` are the first rows of the table; `defects` has by name the defects
    that --defect can inject into one seed."""

    program: str
    about: str
    simulate: Simulate
    seeds: int
    jobs: int
    faults: Sequence[str]
    defects: Mapping[str, Any]

    def main(self) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m {self.program}", description=self.about)
        parser.add_argument("--seeds", type=above_zero, default=self.seeds)
        parser.add_argument("--first", type=int, default=0, help="the first seed")
        parser.add_argument("--jobs", type=above_zero, default=self.jobs, help="processes")
        parser.add_argument("--json", action="store_true", help="print figures as JSON")
        parser.add_argument("--seed", type=int, help="run only this seed")
        parser.add_argument("--trace", action="store_true", help="print the events of --seed")
        parser.add_argument(
            "--defect", choices=sorted(self.defects), default="", help="inject this into --seed"
        )
        options = parser.parse_args()
        console = Console(stderr=options.json)
        if options.seed is not None:
            return self._one(options.seed, options.defect, options.trace, console)
        found = self._many(options.first, options.seeds, options.jobs, console)
        if options.json:
            print(json.dumps(found))
        else:
            self._show(found, console)
        return 1 if found["failed"] else 0

    def _one(self, seed: int, defect: str, trace: bool, console: Console) -> int:
        if defect:
            outcome = self.simulate(seed, self.defects[defect], trace=trace)
        else:
            outcome = self.simulate(seed, trace=trace)
        for line in outcome.trace:
            print(line)
        console.print(outcome.violation or "everything held", highlight=False)
        return 1 if outcome.violation else 0

    def _many(self, first: int, seeds: int, jobs: int, console: Console) -> dict[str, Any]:
        end = first + seeds
        batches = [range(begin, min(begin + _BATCH, end)) for begin in range(first, end, _BATCH)]
        counts: collections.Counter[str] = collections.Counter()
        failed: list[tuple[int, str]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        begun = time.perf_counter()
        with (
            multiprocessing.Pool(jobs) as pool,
            Progress(*columns, TimeRemainingColumn(), console=console) as progress,
        ):
            bar = progress.add_task("seeds", total=seeds)
            batch = functools.partial(_batch, self.simulate)
            for done, happened, violations in pool.imap_unordered(batch, batches):
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

    def _show(self, found: dict[str, Any], console: Console) -> None:
        table = Table(title=f"{found['seeds']} seeds, {found['seeds_per_second']} per second")
        table.add_column("what happened")
        table.add_column("times", justify="right")
        counts = found["counts"]
        for names in (self.faults, sorted(counts.keys() - set(self.faults))):
            for name in names:
                table.add_row(name, f"{counts.get(name, 0):,}")
            table.add_section()
        console.print(table)
        for seed, violation in list(found["failed"].items())[:_SHOWN]:
            console.print(f"[red]seed {seed}[/]: {violation}", highlight=False)
            replay = f".venv/bin/python -m {self.program} --seed {seed} --trace"
            console.print(f"  replay: {replay}", highlight=False)
        proved = "" if found["failed"] else "proved: "
        console.print(f"{proved}{len(found['failed'])} of {found['seeds']:,} seeds failed")


def _batch(
    simulate: Simulate, seeds: range
) -> tuple[int, collections.Counter[str], list[tuple[int, str]]]:
    """Runs some seeds. Returns their number, the counts of events, and the failed seeds with their
    violations."""
    counts: collections.Counter[str] = collections.Counter()
    failed = []
    for seed in seeds:
        outcome = simulate(seed)
        counts += outcome.counts
        if outcome.violation:
            failed.append((seed, outcome.violation))
    return len(seeds), counts, failed
