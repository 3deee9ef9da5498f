"""Runs every benchmark of scripts/run in a smoke size, in a fresh copy of this tree. Proves that
the figures of README and docs/performance.md can be measured. `make bench SUITE=all` calls it.

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
    "": "--quick",
    "control": "--instances 200 --rounds 1 --seconds 0.5",
    "control-endurance": "--instances 200 --cached 2 --seconds 150",
    "gpu": "",
    "moe": "--case 2x128 --blocks 1",
    "router": "--rounds 1 --streams 4 --tokens 32",
    "vllm": "--rounds 1 --tokens 200",
    "vllm-cache": "",
    "weights": "--gb 0.05 --rounds 1",
}
_TABLE: Final = re.compile(r"[─━]{3}")
_WITHOUT_GPU: Final = "it was built and tested on the double"
_SUITE: Final = re.compile(r"^suite bench (?!all )([a-z-]+|'')", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """The outcome of a benchmark."""

    seconds: float
    wrong: str = ""


def suites() -> list[str]:
    """Returns the benchmarks of scripts/run. Raises ValueError if one has no smoke size."""
    table = (ROOT / "scripts/run").read_text()
    found = sorted(name.strip("'") for name in _SUITE.findall(table))
    if unknown := {*found} ^ {*_SMOKE}:
        raise ValueError(f"these have no smoke size, or no suite: {', '.join(sorted(unknown))}")
    return found


def copy_tree(into: Path) -> None:
    """Copies the files that are under version control or are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in {*listed.split("\0")} - {""}:
        if (ROOT / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name, follow_symlinks=False)


def run(suite: str, tree: Path) -> Ran:
    began = SYSTEM_CLOCK.monotonic()
    done = subprocess.run(
        ["make", "bench", f"SUITE={suite}", f"ARGS={_SMOKE[suite]}"],
        cwd=tree,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (LOGS / f"{suite or 'engine'}.log").write_text(done.stdout)
    return Ran(SYSTEM_CLOCK.monotonic() - began, wrong_with(suite, done.stdout))


def wrong_with(suite: str, printed: str) -> str:
    if "Traceback (most recent call last)" in printed:
        return printed.strip().splitlines()[-1]
    if suite == "gpu" and _WITHOUT_GPU in printed:
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
        for suite in suites():
            with console.status(f"make bench SUITE={suite}"):
                ran = run(suite, tree)
            failed += bool(ran.wrong)
            style = "red" if ran.wrong else None
            told = ran.wrong or "its table"
            table.add_row(suite or "engine", _SMOKE[suite], f"{ran.seconds:.0f}", told, style=style)
    console.print(table)
    if failed:
        console.print(f"logs: {LOGS.relative_to(ROOT)}", style="red")
        return 1
    console.print(f"proved: {table.row_count} benchmarks run in a fresh copy of this tree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
