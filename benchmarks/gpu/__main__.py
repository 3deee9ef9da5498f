"""Measures the time to the first token of the reference engine on one GPU.

Compares prefill and decode in two processes, with a transfer of the KV cache, with one process that
does both. Exit code 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

import torch

from benchmarks.gpu.figures import as_json, table
from benchmarks.gpu.run import run_bench
from benchmarks.gpu.settings import on_gpu, smoke


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench SUITE=gpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the processor")
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    if options.smoke:
        settings, device = smoke(), "the processor, figures without meaning"
    elif torch.cuda.is_available():
        settings, device = on_gpu(options.repeats), torch.cuda.get_device_name(0)
    else:
        print("bench-gpu: torch finds no GPU here; --smoke runs without one", file=sys.stderr)
        return 2
    rows = asyncio.run(run_bench(settings))
    if options.json:
        print(json.dumps(as_json(device, rows)))
    else:
        print("\n".join(table(device, rows)))
    return 0 if all(row.tokens_equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
