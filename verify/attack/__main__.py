"""A hostile peer against real workers, over tcp, local and the control plane's REST API.

Exit code 1 if an attempt is not refused or not counted, a byte of the workers' memory changes,
memory, threads or file descriptors leak, or honest transfers keep less than 80 % of their speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import random
import sys

from rich.console import Console

from verify.attack.table import FABRICS, all_altered, all_rows, altered_table, table_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--fabric", choices=FABRICS, action="append", help="by default all")
    parser.add_argument("--seed", type=int, default=None, help="repeat the choices of a run")
    parser.add_argument("--json", action="store_true", help="print rows instead of the table")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    rng = random.Random(seed)
    logging.disable(logging.WARNING)
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 180)
    console.print(f"seed {seed}", highlight=False)
    rows = []
    for row in all_rows(rng, tuple(options.fabric or FABRICS)):
        rows.append(row)
        problems = f": {'; '.join(row.problems)}" if row.problems else ""
        console.print(f"[dim]{row.fabric} {row.name}{problems}", highlight=False)
    altered = list(all_altered(rng)) if "tcp" in (options.fabric or FABRICS) else []
    if options.json:
        found = {"attacks": rows, "altered": altered}
        sys.stdout.write(json.dumps(found, default=_plain) + "\n")
    else:
        console.print(table_of(rows))
        if altered:
            console.print(altered_table(altered))
    for row in rows:
        for problem in row.problems:
            console.print(f"[red]{row.name} ({row.fabric}): {problem}", highlight=False)
    held = not any(row.problems for row in rows)
    if held:
        console.print(f"proved: {len(rows)} attacks and floods, all refused", highlight=False)
    return 0 if held else 1


def _plain(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    return dataclasses.asdict(value)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
