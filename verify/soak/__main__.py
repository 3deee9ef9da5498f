"""Runs random transfers between workers that join, leave and are killed, for a given time.

Exit code 1 if the memory of a worker that lives throughout grows; if such a worker ends with more
file descriptors, or with more threads beyond a full thread pool; if the bytes that were sent,
received, checked by checksum and counted by the engines differ; or if a block is not given back.
Memory is not judged in runs of less than 5 minutes, as pools fill for 3 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Final

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvxfer.cli.output import err, out, show_json
from verify.arguments import minutes_to_run
from verify.polling import eventually

from .flatness import Held, Slope, held_by, memory_slope
from .members import Audit, Counted, Members
from .worker import NUM_BLOCKS

_AT_ONCE: Final = 6
_CHURN_SECONDS: Final = (2.0, 8.0)
_SAMPLE_SECONDS: Final = 1.0
# The time for the last connections to end.
_REST_SECONDS: Final = 10.0
# The most threads that asyncio.to_thread() starts: the default of concurrent.futures.
_POOL_THREADS: Final = min(32, (os.cpu_count() or 1) + 4)
# The number of transfers in the calm phase at the end.
_AUDITED: Final = 100


class Outcome(msgspec.Struct):
    minutes: float
    counted: Counted
    audit: Audit
    joined: int
    left: int
    killed: int
    memory: dict[str, Slope | None]
    """The slope by worker; None if the run was too short to judge."""
    began: dict[str, Held]
    """The state while exactly the workers that live throughout were connected, at the start."""
    ended: dict[str, Held]
    """The same state at the end."""
    engines: dict[str, dict[str, int]]

    def broken(self) -> Iterator[str]:
        counted = self.counted
        if not counted.transfers:
            yield "no transfer ended well"
        if not counted.sent == counted.received == counted.checked:
            yield (
                f"{counted.sent:,} bytes sent, {counted.received:,} received, "
                f"{counted.checked:,} checked"
            )
        for name, slope in self.memory.items():
            if slope and not slope.flat:
                yield f"{name}: memory grew by {slope.growth:.1f} MiB"
            began, ended = self.began[name], self.ended[name]
            if ended.fds > began.fds:
                yield f"{name}: {began.fds} file descriptors became {ended.fds}"
            if ended.threads > began.threads + _POOL_THREADS:
                yield f"{name}: {began.threads} threads became {ended.threads}"
        if not self.audit.reconciled:
            yield f"in the calm phase the books and the engines' counters differ: {self.audit}"
        for name, stats in self.engines.items():
            if stats["free"] != NUM_BLOCKS:
                yield f"{name}: {NUM_BLOCKS - stats['free']} blocks were not given back"


async def soak(minutes: float, rng: random.Random) -> Outcome:
    members = Members(rng)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    try:
        await members.start()
        await members.meet()
        began = _held(members)
        with Progress(*columns, console=err) as progress:
            bar = progress.add_task("soak", total=minutes * 60)
            samples = await _load(members, minutes * 60, rng, progress, bar)
        await members.part()
        await members.meet()
        ended = await _held_at_rest(members, began)
        audit = await members.audit(_AUDITED)
        engines = {name: dict(await member.stats()) for name, member in members.keepers.items()}
    finally:
        await members.end()
    return Outcome(
        minutes=minutes,
        counted=members.counted,
        audit=audit,
        joined=members.joined,
        left=members.left,
        killed=members.killed,
        memory={name: memory_slope(of_worker) for name, of_worker in samples.items()},
        began=began,
        ended=ended,
        engines=engines,
    )


def _held(members: Members) -> dict[str, Held]:
    return {name: held_by(member.process.pid) for name, member in members.keepers.items()}


async def _held_at_rest(members: Members, began: dict[str, Held]) -> dict[str, Held]:
    """Waits until the other workers' connections have ended, at most for _REST_SECONDS."""

    def gone() -> bool:
        held = _held(members)
        return all(
            held[name].fds <= before.fds and held[name].threads <= before.threads + _POOL_THREADS
            for name, before in began.items()
        )

    with contextlib.suppress(TimeoutError):
        await eventually(gone, _REST_SECONDS)
    return _held(members)


async def _load(
    members: Members, seconds: float, rng: random.Random, progress: Progress, bar: object
) -> dict[str, list[tuple[float, Held]]]:
    begun = time.monotonic()
    samples: dict[str, list[tuple[float, Held]]] = {name: [] for name in members.keepers}

    def over() -> bool:
        return time.monotonic() - begun >= seconds

    async def transfers() -> None:
        while not over():
            await members.transfer()

    async def churn() -> None:
        while not over():
            await asyncio.sleep(rng.uniform(*_CHURN_SECONDS))
            await members.churn()

    async def sample() -> None:
        while not over():
            now = time.monotonic() - begun
            for name, member in members.keepers.items():
                samples[name].append((now, held_by(member.process.pid)))
            done = members.counted.transfers
            progress.update(bar, completed=now, description=f"{done:,} transfers")  # type: ignore[arg-type]
            await asyncio.sleep(_SAMPLE_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(transfers())
        tasks.create_task(churn())
        tasks.create_task(sample())
    return samples


def tables(outcome: Outcome) -> Iterator[Table]:
    held = Table(title=f"Held over {outcome.minutes:g} minutes", title_justify="left")
    held.add_column("worker")
    for column in ("memory, MiB", "per hour", "±", "growth", "fds", "threads"):
        held.add_column(column, justify="right")
    for name, slope in outcome.memory.items():
        began, ended = outcome.began[name], outcome.ended[name]
        held.add_row(
            name,
            f"{ended.memory:,.1f}",
            *(
                (f"{slope.per_hour:+.2f}", f"{slope.error_per_hour:.2f}", f"{slope.growth:+.2f}")
                if slope
                else ("not judged", "", "")
            ),
            f"{began.fds} → {ended.fds}",
            f"{began.threads} → {ended.threads}",
            style="bold red" if slope and not slope.flat else None,
        )
    yield held
    counted = outcome.counted
    books = Table(title="Books", title_justify="left", show_header=False)
    books.add_column("")
    books.add_column("", justify="right")
    books.add_row("transfers that ended well", f"{counted.transfers:,}")
    for what in ("sent", "received", "checked"):
        books.add_row(f"bytes {what}", f"{getattr(counted, what):,}")
    for what in ("sent", "engines_sent", "engines_received", "checked"):
        who, _, how = what.rpartition("_")
        name = f"bytes {how}{' by the ' * bool(who)}{who}"
        books.add_row(f"calm phase: {name}", f"{getattr(outcome.audit, what):,}")
    for code, number in counted.errors.most_common():
        books.add_row(f"sides that ended with {code}", f"{number:,}")
    books.add_row("sides that were killed", f"{counted.lost:,}")
    for what in ("joined", "left", "killed"):
        books.add_row(
            f"workers that {'were ' * (what == 'killed')}{what}", str(getattr(outcome, what))
        )
    yield books


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=minutes_to_run, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    err.print(f"seed {seed}", highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        outcome = asyncio.run(soak(options.minutes, random.Random(seed)))
        if options.json:
            show_json(msgspec.to_builtins(outcome))
        else:
            for table in tables(outcome):
                out.print(table)
        problems = list(outcome.broken())
        for problem in problems:
            err.print(f"[red]not held[/] {problem}", highlight=False)
        if not problems:
            counted = outcome.counted
            flat = "memory flat" if all(outcome.memory.values()) else "memory not judged"
            err.print(
                f"proved: {counted.transfers:,} transfers in {options.minutes:g} minutes, "
                f"{counted.checked:,} bytes sent = received = checked, {flat}",
                highlight=False,
                soft_wrap=True,
            )
        return 1 if problems else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
