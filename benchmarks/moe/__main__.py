"""Measures MoE dispatch and combine, over the local fabric and tcp, beside gloo, Open MPI and
memcpy. Takes about ten minutes, and up to 8 GiB of memory.

Exit code 1 if a required target is missed, or a wrong byte arrives.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.moe.cases import CASES
from benchmarks.moe.failure import RankFailed
from benchmarks.moe.run import Settings, run_bench
from benchmarks.moe.table import report_tables
from benchmarks.output import show
from kvxfer.cli.output import err
from verify.arguments import above_zero


def main() -> int:
    usual = Settings()
    names = {f"{each.ranks}x{each.tokens}": each for each in CASES}
    parser = argparse.ArgumentParser(prog="make bench SUITE=moe", description=__doc__)
    parser.add_argument(
        "--case",
        action="append",
        choices=names,
        help="ranks x tokens of each: only these cases (may be given several times)",
    )
    parser.add_argument("--blocks", type=above_zero, default=usual.blocks, help="blocks of rounds")
    parser.add_argument("--mpi", type=Path, metavar="PROGRAM", help="alltoallv.cpp, compiled")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    settings = Settings(
        cases=tuple(names[each] for each in options.case) if options.case else usual.cases,
        blocks=options.blocks,
        mpi=options.mpi,
    )
    try:
        with err.status("starting") as status:
            report = run_bench(settings, status.update)
    except RankFailed as error:
        err.print(str(error))
        return 1
    show(report, report_tables(report), as_json=options.json)
    missed = [each for each in report.verdicts if each.target.required and not each.met]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
