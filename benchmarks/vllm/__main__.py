"""Measures the time to the first token of disaggregated vLLM pairs, and its parts.

A control plane, the router and three vLLM servers with a small model run on this host, for about
ten minutes: pairs with kvxfer, by push and by pull, a pair with vLLM's NixlConnector, and a server
without a connector. Exit code 1 if the visible transfer or the first token misses its target.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.output import show
from benchmarks.vllm.run import Settings, run_bench
from benchmarks.vllm.table import report_tables
from kvxfer.bench.targets import VLLM_PROMPT_TOKENS
from kvxfer.cli.output import err


def main() -> int:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="make bench SUITE=vllm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--tokens", type=int, action="append", help="only these prompts")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    # The targets' prompts are always measured.
    asked = {VLLM_PROMPT_TOKENS, *(options.tokens or usual.lengths)}
    settings = Settings(lengths=tuple(sorted(asked)), rounds=options.rounds, seed=options.seed)
    try:
        with err.status("starting") as status:
            report = run_bench(settings, status.update)
    except (AssertionError, RuntimeError) as error:  # a server that does not start, or fails
        sys.exit(str(error))
    show(report, report_tables(report), as_json=options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
