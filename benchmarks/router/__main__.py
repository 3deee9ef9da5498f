"""Measures the processor time and the first byte of the router, beside a raw ASGI pass-through.

A control plane, the router, the pass-through and two workers without a model run on this host, for
about three minutes. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.output import show
from benchmarks.router.run import Settings, run_bench
from benchmarks.router.table import report_tables
from kvxfer.cli.output import err
from verify.arguments import above_zero


def main() -> int:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="make bench SUITE=router", description=__doc__)
    parser.add_argument("--rounds", type=above_zero, default=usual.rounds)
    parser.add_argument("--streams", type=above_zero, default=usual.streams, help="streams at once")
    parser.add_argument("--tokens", type=above_zero, default=usual.tokens, help="per stream")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    settings = Settings(rounds=options.rounds, streams=options.streams, tokens=options.tokens)
    try:
        with err.status("starting") as status:
            report = run_bench(settings, status.update)
    except (AssertionError, RuntimeError) as error:  # a server or the host is not up to it
        sys.exit(str(error))
    show(report, report_tables(report), as_json=options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
