"""Checks the models of the KV transfer and of a path's end with Spin. Also checks that Spin finds a
violation in each mutation, which lacks one defence.

Exit code 1 if an invariant is violated, or a mutation is not refuted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvxfer.cli.output import err, out, show_json
from verify.model.checks import CHECKS, LARGE, MUTATIONS, Check, Search
from verify.model.verifier import SpinError, Verdict, run

_WIDTH: Final = 116


def table(verdicts: Sequence[Verdict]) -> Table:
    shown = Table(title="The KV transfer, checked by Spin", title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("check")
    shown.add_column("search", no_wrap=True)
    for column in ("states", "depth", "errors", "MiB", "s"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("verdict", no_wrap=True)
    mutating = False
    for verdict in verdicts:
        check = verdict.check
        if check.refuted and not mutating:
            shown.add_section()
            mutating = True
        shown.add_row(
            check.name,
            check.search,
            f"{verdict.states:,}",
            str(verdict.depth),
            str(verdict.errors),
            f"{verdict.memory_mib:,.0f}",
            f"{verdict.seconds:.1f}",
            _told(verdict),
        )
    return shown


def _told(verdict: Verdict) -> str:
    if verdict.check.refuted:
        found = f"refuted: {verdict.violated}" if verdict.violated else "not refuted"
        return found if verdict.met else f"[red]{found}, not {verdict.check.refuted}[/red]"
    holds = "nothing found" if verdict.check.search is Search.BITSTATE else "holds"
    return holds if verdict.met else f"[red]{verdict.violated} is violated[/red]"


def chosen(options: argparse.Namespace) -> tuple[Check, ...]:
    every = (*CHECKS, *(() if options.exhaustive else LARGE), *MUTATIONS)
    return tuple(check for check in every if options.only in check.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make model", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="run checks with TEXT in their name"
    )
    parser.add_argument("--exhaustive", action="store_true", help="leave the bitstate checks out")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    verdicts = []
    with err.status("starting") as status:
        for check in chosen(options):
            status.update(check.name)
            try:
                verdicts.append(run(check))
            except SpinError as error:
                err.print(f"error: {error}", markup=False, highlight=False)
                return 1
    if options.json:
        show_json([{**asdict(verdict), "met": verdict.met} for verdict in verdicts])
    else:
        out.width = max(out.width, _WIDTH)  # the names are long
        out.print(table(verdicts))
    met = bool(verdicts) and all(verdict.met for verdict in verdicts)
    if met:
        refuted = sum(check in MUTATIONS for check in chosen(options))
        err.print(
            f"proved: {len(verdicts) - refuted} checks hold, {refuted} mutations refuted",
            highlight=False,
        )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
