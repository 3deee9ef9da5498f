"""Runs the fuzzers side by side and prints their results. scripts/fuzz builds them first.

Exit code 1 on a crash. With --coverage also if all known inputs together reach less than 95 % of
the lines of a target's decoders.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from verify.arguments import above_zero
from verify.fuzz import inputs, interpreted, native, seeds
from verify.fuzz.python import TARGETS as PYTHON_TARGETS

LEAST_PERCENT: Final = 95.0
WORK: Final = native.ROOT / "build/fuzz-findings"
"""The folder of the findings. They stay between runs, so the next run continues from them."""
SEEDS: Final = native.ROOT / "build/fuzz-seeds"

_BLIND: Final = "Is the code instrumented for coverage?"

TARGETS: Final[dict[str, Any]] = {
    **dict.fromkeys(native.DECODERS, native),
    **dict.fromkeys(PYTHON_TARGETS, interpreted),
}


@dataclass
class Outcome:
    target: str
    executions: int = 0
    per_second: float = 0.0
    coverage: float | None = None
    """The percentage of the decoders' lines; None if it was not requested or not available."""
    missed: dict[str, list[int]] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.crashes and (self.coverage is None or self.coverage >= LEAST_PERCENT)


def fuzz(target: str, seconds: int, with_coverage: bool = False) -> Outcome:
    kind = TARGETS[target]
    found, crashes = WORK / target, WORK / "crashes"
    found.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    corpora = [found, *seeds.folders(target, SEEDS)]
    options = [
        f"-max_total_time={seconds}",
        "-max_len=4096",
        "-timeout=120",  # long enough for a busy machine
        "-rss_limit_mb=2048",
        "-print_final_stats=1",
        f"-artifact_prefix={crashes}/{target}-",
        *map(str, corpora),
    ]
    begun = time.time()
    command, environment = kind.command(target, options)
    ran = subprocess.run(
        command, env=environment, cwd=native.ROOT, capture_output=True, check=False
    )
    log = (ran.stdout + ran.stderr).decode(errors="replace")
    (WORK / f"{target}.log").write_text(log)
    outcome = Outcome(target)
    done = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
    outcome.executions = int(done[1]) if done else 0
    outcome.per_second = outcome.executions / max(time.time() - begun, 1e-3)
    if ran.returncode:
        new = [path for path in crashes.glob(f"{target}-*") if path.stat().st_mtime >= begun]
        new = [path for path in new if not path.name.startswith(f"{target}-slow-unit")]
        kept = [inputs.keep(path, target) for path in new]
        outcome.crashes = [f"{name} of its corpus" for name in kept] or ["see the log"]
        return outcome
    if _BLIND in log:
        outcome.crashes = ["no line of the target is instrumented, so the fuzzer is blind"]
        return outcome
    if not with_coverage:
        return outcome
    try:
        reached = kind.coverage(target, corpora, WORK)
    except subprocess.CalledProcessError as error:
        (WORK / f"{target}.log").write_bytes(error.stderr)
        outcome.crashes = [f"an input of {found} or of the corpus"]
        return outcome
    outcome.coverage, outcome.missed = reached.percent, reached.missed
    return outcome


def fuzz_all(
    targets: Sequence[str], seconds: int, jobs: int, console: Console, with_coverage: bool = False
) -> list[Outcome]:
    """Fuzzes `jobs` targets at the same time. Returns outcomes in the order of the targets."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, transient=True) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def one(target: str) -> Outcome:
            shown = progress.add_task(target, total=seconds)
            try:
                return fuzz(target, seconds, with_coverage)
            finally:
                progress.remove_task(shown)

        outcomes: list[Future[Outcome]] = [pool.submit(one, target) for target in targets]
        while not all(outcome.done() for outcome in outcomes):
            time.sleep(0.5)
            for task in progress.tasks:
                progress.update(task.id, completed=task.elapsed)
        return [outcome.result() for outcome in outcomes]


def table_of(outcomes: list[Outcome]) -> Table:
    table = Table("target", "executions", "per second", "decoder lines", "crashes")
    for column in table.columns[1:]:
        column.justify = "right"
    for outcome in outcomes:
        table.add_row(
            outcome.target,
            f"{outcome.executions:,}",
            f"{outcome.per_second:,.0f}",
            "-" if outcome.coverage is None else f"{outcome.coverage:.1f} %",
            str(len(outcome.crashes)),
            style=None if outcome.good else "red",
        )
    return table


def _range_text(lines: list[int]) -> str:
    return ", ".join(map(str, lines[:12])) + (" …" if len(lines) > 12 else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument(
        "--seconds", type=above_zero, default=30, help="seconds for each target (default: 30)"
    )
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="only this one; may be repeated"
    )
    parser.add_argument(
        "--jobs",
        type=above_zero,
        default=len(os.sched_getaffinity(0)),
        help="targets at the same time (default: one per core)",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help=f"also measure the decoders' lines: fewer than {LEAST_PERCENT:.0f} %% is a failure",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument(
        "--clean", action="store_true", help="first delete the findings of earlier runs"
    )
    options = parser.parse_args()
    if options.clean:
        shutil.rmtree(WORK, ignore_errors=True)
    console = Console(stderr=options.json)
    targets = list(dict.fromkeys(options.target or TARGETS))
    outcomes = fuzz_all(targets, options.seconds, options.jobs, console, options.coverage)
    if options.json:
        sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    else:
        console.print(table_of(outcomes))
    for outcome in outcomes:
        for crash in outcome.crashes:
            console.print(f"{outcome.target}: {crash} (log: {WORK / outcome.target}.log)")
        if not outcome.good and not outcome.crashes:
            for file, lines in outcome.missed.items():
                console.print(f"{outcome.target} does not reach {file}: {_range_text(lines)}")
    good = all(outcome.good for outcome in outcomes)
    if good:
        executions = sum(outcome.executions for outcome in outcomes)
        console.print(
            f"proved: {len(outcomes)} targets, {executions:,} executions, 0 crashes",
            highlight=False,
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
