"""Runs Spin: generates the verifier of a check, compiles it with gcc, and reads its verdict."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verify.model.checks import Check, Search

MODELS: Final = Path(__file__).parent

_MEMORY_MIB: Final = 7500
_SECONDS: Final = 1200
_COMPILE: Final = {
    Search.EXHAUSTIVE: ("-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={_MEMORY_MIB}"),
    Search.BITSTATE: ("-DSAFETY", "-DBITSTATE", "-DT_RAND", "-DP_RAND"),
    Search.FORMULA: ("-DCOLLAPSE", "-DNFAIR=3", f"-DMEMLIM={_MEMORY_MIB}"),
    Search.CYCLES: ("-DCOLLAPSE", "-DNP", f"-DMEMLIM={_MEMORY_MIB}"),
}
_RUN: Final = {
    Search.EXHAUSTIVE: (),
    Search.BITSTATE: ("-w32", "-k2", "-RS1", "-Q1"),  # half a GiB of bits; seed 1; one minute
    Search.FORMULA: ("-a", "-f"),
    Search.CYCLES: ("-l",),
}
# The verifier's message when a search did not reach its end.
_CUT_SHORT: Final = re.compile(r"max search depth too small|reached -DMEMLIM|out of memory|aborted")


class SpinError(Exception):
    """Spin, gcc or the verifier failed; the text is its output."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check. `violated` is the invariant or other error that was found, or None."""

    check: Check
    states: int
    transitions: int
    depth: int
    errors: int
    violated: str | None
    seconds: float
    memory_mib: float
    hash_factor: float | None  # for a bitstate search; best above 100

    @property
    def met(self) -> bool:
        """Whether the verdict is the one that the check requires."""
        return self.violated == self.check.refuted


def run(check: Check) -> Verdict:
    """Runs a check. Raises SpinError."""
    with tempfile.TemporaryDirectory(prefix="kvxfer-model-") as folder:
        defines = [
            f"-D{name}" if value is None else f"-D{name}={value}"
            for name, value in check.defines.items()
        ]
        _call(["spin", "-a", *defines, str(MODELS / check.model)], folder)
        _call(["gcc", "-O1", "-w", "-o", "pan", "pan.c", *_COMPILE[check.search]], folder)
        formula = ("-N", check.formula) if check.formula else ()
        told = _call(["./pan", "-m20000", *_RUN[check.search], *formula], folder)
    return read_verdict(check, told)


def read_verdict(check: Check, told: str) -> Verdict:
    """Parses the verifier's output. Raises SpinError if the search did not reach its end."""
    errors = int(_number(r"errors: (\d+)", told))
    if cut := _CUT_SHORT.search(told):
        raise SpinError(f"{check.name}: the search did not finish: {cut[0]}")
    factor = re.search(r"hash factor: ([\d.]+)", told)
    return Verdict(
        check=check,
        states=int(_number(r"([\d.e+]+) states, stored", told)),
        transitions=int(_number(r"([\d.e+]+) transitions", told)),
        depth=int(_number(r"depth reached (\d+)", told)),
        errors=errors,
        violated=_violated(told) if errors else None,
        seconds=_number(r"elapsed time ([\d.e-]+) seconds", told),
        memory_mib=_number(r"([\d.]+)\s+total actual memory usage", told),
        hash_factor=float(factor[1]) if factor else None,
    )


def _violated(told: str) -> str:
    if invariant := re.search(r"assertion violated \(?invariant_(\d)", told):
        return f"invariant {invariant[1]}"
    found = re.search(r"pan:\d+: (.*?) \(at depth", told)
    return found[1] if found else "an error without a name"


def _number(pattern: str, told: str) -> float:
    found = re.search(pattern, told)
    if found is None:
        raise SpinError(f"the verifier's report has no {pattern!r}:\n{told}")
    return float(found[1])


def _call(command: Sequence[str], folder: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except FileNotFoundError:
        raise SpinError(
            f"{command[0]} is not installed; run scripts/setup test, or apt-get install "
            f"{command[0]}"
        ) from None
    except subprocess.TimeoutExpired:
        raise SpinError(f"{command[0]} took more than {_SECONDS} s") from None
    # The verifier's exit status is 0 even if it has found an error.
    if done.returncode != 0:
        raise SpinError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout
