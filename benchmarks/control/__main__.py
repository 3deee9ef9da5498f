"""Measures the control plane with 10,000 instances, on the embedded registry and on a real Redis,
beside an empty FastAPI route. Takes about two minutes.

Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.control.run import Settings, run_bench
from benchmarks.control.table import report_tables, tracing_table
from benchmarks.control.tracing import measure_tracing
from benchmarks.output import show
from kvxfer.bench.targets import CONTROL
from kvxfer.cli.output import err


def main() -> int:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="make bench SUITE=control", description=__doc__)
    parser.add_argument("--instances", type=int, default=usual.instances)
    parser.add_argument("--registry", choices=CONTROL, help="only this one")
    parser.add_argument("--connections", type=int, default=usual.connections)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="per route, round")
    parser.add_argument("--tracing", action="store_true", help="measure only what tracing costs")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    if options.tracing:
        costs = asyncio.run(measure_tracing())
        show(costs, [tracing_table(costs)], as_json=options.json)
        return 0
    settings = Settings(
        instances=options.instances,
        registries=(options.registry,) if options.registry else usual.registries,
        connections=options.connections,
        rounds=options.rounds,
        seconds=options.seconds,
    )
    with err.status("starting") as status:
        report = run_bench(settings, status.update)
    show(report, report_tables(report), as_json=options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
