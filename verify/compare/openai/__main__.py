"""Compares a pair of vLLM behind `kvxfer router` with one aggregated server: every answer has to be
the same, by push and by pull. `make test SUITE=openai` calls it.

Exit code 1 if an answer differs and no row of docs/router.md excuses it. In a run of all models
also if a row excuses nothing, too many answers are excused, or a member was not sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from verify.arguments import above_zero
from verify.compare.openai.answers import Answer
from verify.compare.openai.by_hand import by_hand
from verify.compare.openai.cases import Case, Texts, singles, together
from verify.compare.openai.comparison import (
    ServerLost,
    Tally,
    can_be_pulled,
    compare,
    pulled,
    straight,
)
from verify.compare.openai.excuses import read_excuses
from verify.compare.openai.members import CLASSES, ROUTES, Values, members_of
from verify.compare.openai.pairs import PairCover
from verify.compare.openai.servers import SETUPS, Compared, Setup, serving
from verify.processes.process import ProcessFailed

LEAST_COMPARED: Final = 1500
MOST_EXCUSED: Final = 0.03
_SHOWN: Final = 40
# One of this number of generated requests goes to the other models as well.
_STEP: Final = 6


def generated(members: Mapping[str, Mapping[str, Values]], texts: Texts) -> Iterator[Case]:
    for route in ROUTES:
        yield from singles(route, members[route], texts)


def written(setup: Setup, texts: Texts) -> Iterator[Case]:
    yield from by_hand(texts)
    for name in setup.adapters:
        for case in by_hand(texts):
            bodies = tuple(
                {**body, "model": name} if isinstance(body, dict) and "model" in body else body
                for body in case.bodies
            )
            yield replace(case, name=f"{name}: {case.name}", bodies=bodies)


class Comparison:
    """A run over several models, with one request of `every`."""

    def __init__(self, seed: int, every: int, console: Console) -> None:
        self.seed = seed
        self.every = every
        self.console = console
        self.tally = Tally()
        self.excuses = read_excuses()
        self.sent: dict[str, set[tuple[str, str]]] = {route: set() for route in ROUTES}
        self.members: dict[str, dict[str, Values]] = {}
        self.pairs: dict[str, PairCover] = {}
        self.moved: dict[str, float] = {}
        self.lost: list[str] = []

    def run(self, servers: Compared, setup: Setup) -> None:
        """Sends all requests for one model, in every way."""
        document = servers.aggregated.get("/openapi.json").json()
        self.members = {route: members_of(document, route) for route in ROUTES}
        aggregated = straight(servers.aggregated.url)
        router = straight(servers.fleet.router.url)
        proxied = pulled(servers.prefill.url, servers.decode.url)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=self.console) as progress:

            def all_of(way: str, to: Any, number: int) -> list[list[Answer]]:
                texts = Texts(self.seed + number)
                every = list(generated(self.members, texts))
                offset = random.Random(self.seed).randrange(_STEP)
                cases = every if setup.whole else every[offset::_STEP]
                cases += written(setup, texts)
                if self.every > 1:
                    chosen = random.Random(self.seed + number)
                    cases = chosen.sample(cases, len(cases) // self.every)
                cases = [case for case in cases if not setup.spared(case)]
                if way == "pull":
                    cases = [case for case in cases if can_be_pulled(case)]
                task = progress.add_task(f"{setup.name}: {way}", total=len(cases))
                before = servers.received_tokens()
                ways = {way: to}
                if way == "push" and servers.second is not None:
                    # Sent beside each request: a server's cache depends on the requests before.
                    ways["itself"] = straight(servers.second.url)
                work = compare(
                    *(cases, aggregated, ways, self.excuses, self.tally),
                    lambda: progress.advance(task),
                )
                found = asyncio.run(work)
                self.moved[f"{setup.name}, {way}"] = servers.received_tokens() - before
                if way == "push":
                    self._note(cases)
                    if setup.whole:
                        self._pairs(cases, found, aggregated, router, progress)
                return found

            all_of("push", router, 0)
            all_of("pull", proxied, 1)

    def _note(self, cases: Sequence[Case]) -> None:
        for case in cases:
            if case.covers:
                self.sent[case.route] |= case.covers

    def _pairs(
        self,
        cases: Sequence[Case],
        found: Sequence[Sequence[Answer]],
        aggregated: Any,
        router: Any,
        progress: Progress,
    ) -> None:
        """Sends bodies of many members, until each valid pair was answered."""
        texts, rng = Texts(self.seed + 3), random.Random(self.seed)
        for route in ROUTES:
            taken = {
                name
                for case, (answer, *_) in zip(cases, found, strict=True)
                for name, kind in case.covers
                if case.route == route and kind == "ordinary" and answer.status == 200
                # Requests that the router refuses are compared alone.
                if not any(each.refuses(route, case.bodies[0]) for each in self.excuses)
            }
            cover = self.pairs[route] = PairCover(sorted(taken), rng)
            task = progress.add_task(f"{route}: pairs of members", total=cover.total)
            while cover.left:
                names = cover.next()
                asked = together(route, self.members[route], names, texts)
                work = compare([asked], aggregated, {"push": router}, self.excuses, self.tally)
                [[answer]] = asyncio.run(work)
                cover.told(names, answered=answer.status == 200)
                progress.update(task, completed=cover.total - len(cover.left))

    def missing(self) -> list[str]:
        """Returns the members and classes that no request has covered."""
        return [
            f"{route} {name}: {kind}"
            for route, members in self.members.items()
            for name in members
            for kind in CLASSES
            if (name, kind) not in self.sent[route]
        ]

    def problems(self) -> list[str]:
        """Returns the servers that ended, and the answers that differ, in words."""
        return self.lost + [each.told() for each in self.tally.different]

    def gaps(self) -> list[str]:
        """Returns the comparisons of a whole run that are missing, and excuses without a use."""
        tally, found = self.tally, [f"not sent: {each}" for each in self.missing()]
        pushed = tally.compared["push"]
        if pushed < LEAST_COMPARED:
            found.append(f"{pushed} requests were compared by push, not {LEAST_COMPARED}")
        if tally.excused.total() > MOST_EXCUSED * pushed:
            found.append(f"{tally.excused.total()} of {pushed} differences are excused")
        found += [
            f"docs/router.md: this row excuses nothing: {excuse.route} {excuse.member}"
            for excuse in self.excuses
            if not tally.excused[excuse]
        ]
        return found

    def tables(self) -> Iterator[Table]:
        coverage = Table(
            "route", "members", "classes", "sent", "pairs", "valid", "answered", "refused"
        )
        for route, members in self.members.items():
            of_route, cover = self.sent[route], self.pairs.get(route)
            wanted = len(members) * len(CLASSES)
            cells = [len(members), wanted, f"{len(of_route)} ({len(of_route) / wanted:.0%})"]
            if cover is not None:
                valid = cover.total - len(cover.refused)
                answered = f"{len(cover.answered)} ({len(cover.answered) / valid:.0%})"
                cells += [cover.total, valid, answered, len(cover.refused)]
            coverage.add_row(route, *map(str, cells))
        yield coverage
        results = Table("way", "compared", "equal", "excused", "different")
        for way, count in sorted(self.tally.compared.items()):
            different = sum(each.way == way for each in self.tally.different)
            excused = self.tally.excused.total() if way == "push" else 0
            equal = count - different - excused
            results.add_row(way, str(count), str(equal), str(excused), str(different))
        yield results
        moved = Table("model, way", "prompt tokens from prefill")
        for name, tokens in self.moved.items():
            moved.add_row(name, f"{tokens:,.0f}")
        yield moved


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test SUITE=openai", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", action="append", choices=[setup.name for setup in SETUPS])
    parser.add_argument(
        "--every",
        type=above_zero,
        default=1,
        metavar="N",
        help="send one of N requests, by the seed",
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument("--shown", type=above_zero, default=_SHOWN, help="differences to print")
    options = parser.parse_args()
    console = Console(stderr=options.json)
    console.print(f"seed {options.seed}")
    comparison = Comparison(options.seed, options.every, console)
    whole = options.every == 1 and options.model is None
    with tempfile.TemporaryDirectory(prefix="kvxfer-openai-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for setup in SETUPS:
            if options.model is None or setup.name in options.model:
                second = setup.whole and options.every == 1
                try:
                    with serving(folder, setup, second=second) as servers:
                        comparison.run(servers, setup)
                except (ServerLost, ProcessFailed) as lost:
                    comparison.lost.append(
                        f"{setup.name}: {lost}; for the servers' logs, run it with --logs FOLDER"
                    )
    for table in comparison.tables():
        console.print(table)
    problems = comparison.problems() + (comparison.gaps() if whole else [])
    for problem in problems[: options.shown]:
        console.print(problem, markup=False, highlight=False, style="red")
    if len(problems) > options.shown:
        console.print(f"and {len(problems) - options.shown} more")
    if options.json:
        told = {"seed": options.seed, "compared": comparison.tally.compared, "problems": problems}
        print(json.dumps(told))
    if not problems:
        compared = comparison.tally.compared
        console.print(f"proved: {compared['push']} requests by push and {compared['pull']} by pull")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
