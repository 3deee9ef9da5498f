"""Measures weight updates from 4 training to 2 inference processes, beside raw writes of the engine
and beside gloo. Takes about three minutes, and about five times the weights in memory.

Exit code 1 if a required target is missed, or a wrong byte arrives.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.output import show
from benchmarks.weights.run import RankFailed, Settings, run_bench
from benchmarks.weights.table import report_tables
from kvxfer.cli.output import err
from verify.arguments import above_zero

_LEAST_GB = 0.001
_MOST_GB = 1000.0


def main() -> int:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="make bench SUITE=weights", description=__doc__)
    parser.add_argument("--gb", type=float, default=usual.gb, help="10⁹ bytes of parameters")
    parser.add_argument("--rounds", type=above_zero, default=usual.rounds)
    parser.add_argument("--fabric", choices=usual.fabrics, help="only this one")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    if not _LEAST_GB <= options.gb <= _MOST_GB:
        parser.error(f"argument --gb: {options.gb:g} is not between {_LEAST_GB:g} and {_MOST_GB:g}")
    settings = Settings(
        gb=options.gb,
        rounds=options.rounds,
        fabrics=(options.fabric,) if options.fabric else usual.fabrics,
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
