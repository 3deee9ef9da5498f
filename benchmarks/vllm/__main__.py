"""Time to the first token of disaggregated vLLM pairs, and where it goes.

A control plane, the router and three vLLM servers with a small model run on this host, for about
ten minutes: pairs with kvxfer, by push and by pull, one with vLLM's own NixlConnector, and a server
without connector. Exit code 1 where kvxfer's push leaves more than half of the visible transfer
that NixlConnector has, or its first token comes after that of pull.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from benchmarks.vllm.figures import TARGET_TOKENS
from benchmarks.vllm.run import Settings, run_bench
from benchmarks.vllm.table import report_tables
from kvxfer.cli.output import err, out, show_json


def main() -> int:
    usual = Settings()
    parser = argparse.ArgumentParser(prog="bench-vllm", description=__doc__)
    parser.add_argument("--rounds", type=int, default=usual.rounds)
    parser.add_argument("--tokens", type=int, action="append", help="only these prompts")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    lengths = tuple(sorted({TARGET_TOKENS, *options.tokens})) if options.tokens else usual.lengths
    settings = Settings(lengths=lengths, rounds=options.rounds, seed=options.seed)
    try:
        with err.status("starting") as status:
            report = run_bench(settings, status.update)
    except (AssertionError, RuntimeError) as error:  # a server that does not start, or fails
        sys.exit(str(error))
    if options.json:
        show_json(msgspec.to_builtins(report))
    else:
        for table in report_tables(report):
            out.print(table)
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main())
