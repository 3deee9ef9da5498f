"""The Python targets: the command to run one, and the coverage of its decoders by a corpus."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verify.fuzz.coverage import Coverage
from verify.fuzz.native import ROOT
from verify.fuzz.python import load


def command(target: str, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command that runs a target under atheris, and its environment."""
    return [sys.executable, "-m", "verify.fuzz.atheris_main", target, *options], {**os.environ}


def coverage(target: str, corpora: Sequence[Path], scratch: Path) -> Coverage:
    """Returns the lines of the target's decoders that the inputs reach. Raises CalledProcessError
    if an input fails."""
    decoders = load(target).DECODERS
    data, report = scratch / f"{target}.coverage", scratch / f"{target}.json"
    tool = [sys.executable, "-m", "coverage"]
    only = f"--include={','.join(str(ROOT / file) for file in decoders)}"
    replay = ["-m", "verify.fuzz.replay", target, *map(str, corpora)]
    for arguments in (
        ["run", f"--data-file={data}", only, *replay],
        ["json", f"--data-file={data}", "--quiet", "-o", str(report)],
    ):
        subprocess.run([*tool, *arguments], cwd=ROOT, check=True, capture_output=True)
    files = json.loads(report.read_text())["files"]
    reached = Coverage()
    for file, patterns in decoders.items():
        parts = [files[file]]
        if patterns is not None:
            parts = [
                function
                for name, function in files[file]["functions"].items()
                if any(fnmatch.fnmatch(name, f"{pattern}*") for pattern in patterns)
            ]
        lines = {line: True for part in parts for line in part["executed_lines"]}
        lines |= {line: False for part in parts for line in part["missing_lines"]}
        reached.add(file, lines)
    return reached
