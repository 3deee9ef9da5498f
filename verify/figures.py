"""Runs every benchmark of the Makefile in a smoke size, in a fresh copy of this tree. Proves that
the figures of README and docs/performance.md can be measured. `make figures` calls it.

The copy has no environment and nothing built. At these sizes the figures mean nothing, so a missed
target is not a failure; a benchmark that prints no table is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from kvxfer.clock import SYSTEM_CLOCK

ROOT: Final = Path(__file__).parents[1]
LOGS: Final = ROOT / "build/figures"

_SMOKE: Final = {
    "bench": "--quick",
    "bench-control": "--instances 200 --rounds 1 --seconds 0.5",
    "bench-gpu": "",
    "bench-moe": "--case 2x128 --blocks 1",
    "bench-router": "--rounds 1 --streams 4 --tokens 32",
    "bench-vllm": "--rounds 1 --tokens 200",
    "bench-weights": "--gb 0.05 --rounds 1",
}
_TABLE: Final = re.compile(r"[─━]{3}")
_WITHOUT_GPU: Final = "it was built and tested on the double"
_TARGET: Final = re.compile(r"^(bench[a-z-]*):", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """The outcome of a benchmark."""

    target: str
    seconds: float
    wrong: str = ""


def targets() -> list[str]:
    """Returns the benchmarks of the Makefile. Raises ValueError if one has no smoke size."""
    found = sorted(_TARGET.findall((ROOT / "Makefile").read_text()))
    if unknown := {*found} ^ {*_SMOKE}:
        raise ValueError(f"these have no smoke size, or no target: {', '.join(sorted(unknown))}")
    return found


def copy_tree(into: Path) -> None:
    """Copies the files that are under version control or are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in {*listed.split("\0")} - {""}:
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)


def run(target: str, tree: Path) -> Ran:
    began = SYSTEM_CLOCK.monotonic()
    done = subprocess.run(
        ["make", target, f"BENCH={_SMOKE[target]}"],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (LOGS / f"{target}.log").write_text(done.stdout)
    return Ran(target, SYSTEM_CLOCK.monotonic() - began, wrong_with(target, done.stdout))


def wrong_with(target: str, printed: str) -> str:
    if "Traceback (most recent call last)" in printed:
        return printed.strip().splitlines()[-1]
    if target == "bench-gpu" and _WITHOUT_GPU in printed:
        return ""
    return "" if _TABLE.search(printed) else "it printed no table"


def main() -> int:
    console = Console()
    LOGS.mkdir(parents=True, exist_ok=True)
    table = Table("benchmark", "smoke size", "seconds", "result")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="kvxfer-figures-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for target in targets():
            with console.status(f"make {target}"):
                ran = run(target, tree)
            failed += bool(ran.wrong)
            style = "red" if ran.wrong else None
            told = ran.wrong or "its table"
            table.add_row(target, _SMOKE[target], f"{ran.seconds:.0f}", told, style=style)
    console.print(table)
    if failed:
        console.print(f"logs: {LOGS.relative_to(ROOT)}", style="red")
        return 1
    console.print(f"proved: {table.row_count} benchmarks run in a fresh copy of this tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
