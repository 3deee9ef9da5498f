"""Writes the seeds of all targets, or of the named ones, into DIR/TARGET, and the inputs that
fuzzing found into DIR/found/TARGET."""

from __future__ import annotations

import argparse
from pathlib import Path

from verify.fuzz import seeds

parser = argparse.ArgumentParser(prog="python -m verify.fuzz.seeds", description=__doc__)
parser.add_argument("--into", type=Path, required=True, metavar="DIR")
parser.add_argument(
    "--target", action="append", choices=seeds.TARGETS, help="only this one; may be repeated"
)
options = parser.parse_args()
for target in options.target or seeds.TARGETS:
    seeds.folders(target, options.into)
