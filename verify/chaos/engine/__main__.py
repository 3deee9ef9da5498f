"""Breaks workers and their network in mid-transfer, in many random rounds, over every fabric that
runs on this host. Prints the outcomes.

Exit code 1 on any wrong byte, any leaked block, a worker that hangs, or a detection p99 above 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvxfer.cli.output import err, out
from verify.arguments import above_zero
from verify.chaos.link import why_no_links
from verify.chaos.percentile import percentile

from .catalogue import FABRICS, PORTS, Fabric, Fault
from .chaos import Round, arena
from .rdma_ports import on_an_emulated_machine

MAX_DETECTION_SECONDS: Final = 1.0
_DEVICES: Final = Path("/sys/class/infiniband")
# Rounds take longer on the emulated machine with RDMA devices, and a few rounds show as much.
_VERBS_SHARE: Final = 0.02
# 14 MiB: its CPUs carry every packet. With 32 MiB they would send no heartbeat for a second.
_EMULATED_BLOCKS: Final = 56


class Rounds:
    """The faults for all arenas, and their findings. Loop only."""

    def __init__(self, count: int, fabrics: list[Fabric], rng: random.Random) -> None:
        kinds = [(fabric, fault) for fabric in fabrics for fault in fabric.faults]
        rng.shuffle(kinds)
        self._waiting = collections.defaultdict[str, list[tuple[Fault, int]]](list)
        for fabric, fault in itertools.islice(itertools.cycle(kinds), count):
            self._waiting[fabric.name].append((fault, rng.getrandbits(32)))
        self.done: list[Round] = []

    async def run(self, fabric: Fabric, progress: Progress) -> None:
        waiting = self._waiting[fabric.name]
        if not waiting:
            return
        async with arena(fabric) as workers:
            while waiting:
                fault, seed = waiting.pop()
                one = await workers.round(fault, seed)
                self.done.append(one)
                progress.advance(progress.task_ids[0])
                late = one.detection is not None and one.detection > MAX_DETECTION_SECONDS
                if one.wrong_bytes or one.leaked_blocks or one.hung or late:
                    progress.console.print(one)


async def run(
    count: int, fabrics: list[Fabric], parallel: int, rng: random.Random, console: Console
) -> list[Round]:
    """Runs `count` rounds: every fault on every fabric in turn, in random order, all else
    random."""
    rounds = Rounds(count, fabrics, rng)
    columns = (TextColumn("rounds"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        progress.add_task("rounds", total=count)
        async with asyncio.TaskGroup() as arenas:
            for fabric in fabrics:
                for _ in range(parallel):
                    arenas.create_task(rounds.run(fabric, progress))
    return rounds.done


def on_a_machine_with_rdma(count: int, faults: Iterable[Fault], seed: int) -> list[Round]:
    """Runs the rounds of verbs in the emulated machine, on a host without RDMA devices."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-chaos-") as folder:
        found = Path(folder) / "rounds.json"
        command = ["scripts/rxe-machine", "--share", folder, "--timeout", "3600"]
        command += ["--env", "PYTHONDONTWRITEBYTECODE=1", "--"]
        command += [sys.executable, "-m", "verify.chaos.engine", "--rounds", str(count)]
        command += ["--fabric", "verbs", "--parallel", "1", "--seed", str(seed)]
        for fault in faults:
            command += ["--fault", str(fault)]
        subprocess.run([*command, "--write", str(found)], check=False, stdout=sys.stderr)
        if not found.exists():
            sys.exit("chaos: the emulated machine with RDMA devices did not finish its rounds")
        return [Round(**one) for one in json.loads(found.read_text())]


def table_of(rounds: list[Round]) -> Table:
    table = Table(
        title="Workers and network broken in mid-transfer; wrong bytes, leaked blocks, seconds",
        title_justify="left",
        padding=(0, 0),
    )
    for column in ("fabric", "fault"):
        table.add_column(column, no_wrap=True)
    for column in ("rounds", "well", "wrong", "leaked", "hung", "p50", "p99"):
        table.add_column(column, justify="right", no_wrap=True)
    cells: dict[tuple[str, str], list[Round]] = collections.defaultdict(list)
    for one in rounds:
        cells[one.fabric, one.fault].append(one)
    for (fabric, fault), found in sorted(cells.items()):
        table.add_row(fabric, fault, *_figures(found))
    table.add_section()
    table.add_row("all", "all", *_figures(rounds))
    return table


def _figures(found: list[Round]) -> Iterator[str]:
    yield f"{len(found):,}"
    yield f"{sum(one.error is None and not one.hung for one in found):,}"
    yield f"{sum(one.wrong_bytes for one in found):,}"
    yield f"{sum(one.leaked_blocks for one in found):,}"
    yield f"{sum(bool(one.hung) for one in found):,}"
    seconds = detections(found)
    yield from (f"{percentile(seconds, p):.3f}" if seconds else "-" for p in (0.5, 0.99))


def detections(rounds: Iterable[Round]) -> list[float]:
    return [one.detection for one in rounds if one.detection is not None]


def broken(rounds: list[Round]) -> Iterator[str]:
    """Yields the broken promises, in words."""
    if wrong := [one for one in rounds if one.wrong_bytes]:
        yield f"{len(wrong)} rounds with wrong bytes, such as {wrong[0]}"
    if leaked := [one for one in rounds if one.leaked_blocks]:
        yield f"{len(leaked)} rounds with leaked blocks, such as {leaked[0]}"
    if hung := [one for one in rounds if one.hung]:
        yield f"{len(hung)} rounds that hung, such as {hung[0]}"
    cells: dict[tuple[str, str], list[Round]] = collections.defaultdict(list)
    for one in rounds:
        cells[one.fabric, one.fault].append(one)
    for (fabric, fault), found in sorted(cells.items()):
        seconds = detections(found)
        if seconds and percentile(seconds, 0.99) > MAX_DETECTION_SECONDS:
            p99 = percentile(seconds, 0.99)
            yield f"{fault} over {fabric}: p99 of the detection is {p99:.2f} s"


def only(fabric: Fabric, wanted: Callable[[Fault], bool]) -> Fabric:
    return replace(fabric, faults=tuple(filter(wanted, fabric.faults)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument(
        "--rounds", type=above_zero, default=1000, help="over all faults and fabrics"
    )
    parser.add_argument("--fabric", action="append", choices=list(FABRICS), help="break only these")
    faults = sorted({str(fault) for fabric in FABRICS.values() for fault in fabric.faults})
    parser.add_argument("--fault", action="append", choices=faults, help="cause only these")
    parser.add_argument(
        "--parallel", type=above_zero, default=4, help="pairs of workers per fabric"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true", help="print every round instead of a table")
    parser.add_argument("--write", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    err.print(f"seed {seed}", highlight=False)
    fabrics = [FABRICS[name] for name in options.fabric or FABRICS]
    if options.fault:
        fabrics = [only(fabric, lambda fault: str(fault) in options.fault) for fabric in fabrics]
    if reason := why_no_links():
        err.print(f"without faults of the network: {reason}")
        fabrics = [fabric for fabric in fabrics if not fabric.linked]
    rounds: list[Round] = []
    here, count = fabrics, options.rounds
    verbs = [fabric for fabric in fabrics if fabric.engine == "verbs" and fabric.faults]
    if verbs and not any(_DEVICES.glob("*")):
        here = [fabric for fabric in fabrics if fabric not in verbs]
        share = round(count * _VERBS_SHARE) if here else count
        rounds += on_a_machine_with_rdma(share, verbs[0].faults, seed)
        count -= share
    elif on_an_emulated_machine():
        here = [replace(fabric, most_blocks=_EMULATED_BLOCKS) for fabric in here]
    else:
        here = [
            replace(f, faults=(*(set(f.faults) - set(PORTS)),)) if f in verbs else f for f in here
        ]
    if here:
        rng = random.Random(seed)
        rounds += asyncio.run(run(count, here, options.parallel, rng, err))
    if options.write is not None:
        options.write.write_text(json.dumps([asdict(one) for one in rounds]))
    if options.json:
        sys.stdout.write(json.dumps([asdict(one) for one in rounds]) + "\n")
    else:
        out.print(table_of(rounds))
    problems = list(broken(rounds))
    for problem in problems:
        err.print(f"[red]not held[/] {problem}", highlight=False)
    if not problems:
        slowest = percentile(detections(rounds), 0.99)
        err.print(
            f"proved: {len(rounds):,} rounds, 0 wrong, 0 leaked, 0 hung, p99 {slowest:.2f} s",
            highlight=False,
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
