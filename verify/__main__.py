"""Runs all long checks, one step after the other, and prints what each step proved.

`make verify` calls it. It takes about two hours on two cores. Each step is a make target, which can
also run alone and search longer: `make simulate SEEDS=1000000`. A step that has passed on the same
tree is skipped, so an interrupted run goes on where it stopped. Logs and results are in
build/verify.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvxfer.clock import SYSTEM_CLOCK

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "build/verify"

# Matches the last line of a program, of pytest or of doctest.
_PROVED: Final = re.compile(
    r"^(?:proved: (?P<program>.+)"
    r"|=+ (?P<pytest>\d+ passed.*?) =+"
    r"|\[doctest\] test cases: +\d+ \| +(?P<doctest>\d+ passed \| +0 failed).*)$",
    re.MULTILINE,
)
_TAIL: Final = 12


@dataclass(frozen=True)
class Step:
    """A target of make, its suite and variables."""

    target: str
    suite: str
    about: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.target}-{self.suite}" if self.suite else self.target

    @property
    def command(self) -> list[str]:
        given = (f"{name}={value}" for name, value in self.variables.items())
        return ["make", self.target, f"SUITE={self.suite}", *given]


STEPS: Final = (
    Step("model", "", "the protocol, in every order of events"),
    Step("attack", "", "a hostile peer, on every fabric"),
    Step("simulate", "", "the code of sessions on virtual time", {"SEEDS": "20000"}),
    Step("simulate", "moe", "the views of MoE groups on virtual time"),
    Step("sanitize", "", "the engine under ASan with UBSan, and under TSan", {"WHOLE": "1"}),
    Step("test", "aarch64", "the engine on ARM, as far as qemu shows it"),
    Step("test", "gpu", "GPU memory; planted defects in its code are caught"),
    Step("test", "verbs", "Soft-RoCE with one, two and four devices"),
    Step("test", "vllm", "the connector in the real vLLM"),
    Step("test", "openai", "a pair of vLLM behind the router answers as one aggregated server"),
    Step("test", "clients", "real clients get from the router what they get from vLLM"),
    Step("test", "router-defects", "defects in the router, each caught by a test"),
    Step("bench", "all", "every benchmark runs in a fresh copy of the tree"),
    Step("test", "moe", "MoE groups of up to eight ranks, with ranks killed and frozen"),
    Step("test", "weights", "weight updates, with a training job and a live vLLM"),
    Step("test", "vllm-gpu", "the connector with caches in GPU memory"),
    Step("chaos", "vllm", "vLLM servers killed and frozen under load"),
    Step("chaos", "weights", "weight updates whose members are killed and frozen"),
    Step("chaos", "moe", "MoE groups whose ranks are killed and frozen at every phase"),
    Step(
        "chaos", "", "workers, network and control plane broken in mid-transfer", {"ROUNDS": "2000"}
    ),
    Step(
        "chaos",
        "overload",
        "a pair of vLLM with three times the requests that it can serve",
    ),
    Step("soak", "", "memory is flat, and every byte is accounted for", {"MINUTES": "10"}),
    Step("fuzz", "", "every decoder of bytes from outside", {"SECONDS": "30"}),
)


class Result(msgspec.Struct, frozen=True):
    """The outcome of a step. `tree` is a digest of all files that it ran on."""

    tree: str
    passed: bool
    seconds: float
    proved: str


def digest_of_tree() -> str:
    """Returns a digest of every file that is under version control or is not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    digest = hashlib.sha256()
    for name in sorted({*listed.split(b"\0")} - {b""}):
        path = ROOT / os.fsdecode(name)
        digest.update(name + b"\0")
        if path.is_symlink():
            digest.update(os.fsencode(path.readlink()))
        elif path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def what_it_proved(log: str) -> str:
    """Returns the programs' summaries; empty if no program reports that it finished."""
    return "; ".join(
        next(words for words in found.groups() if words) for found in _PROVED.finditer(log)
    )


def run(step: Step, tree: str, console: Console) -> Result:
    """Runs one step. Its processes end with it, even if this process is interrupted."""
    log = WORK / f"{step.name}.log"
    began = SYSTEM_CLOCK.monotonic()
    with log.open("wb") as out, console.status(f"{step.name}: {step.about}"):
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            status = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
    proved = what_it_proved(log.read_text(errors="replace"))
    seconds = SYSTEM_CLOCK.monotonic() - began
    return Result(tree, status == 0 and bool(proved), seconds, proved or f"exit status {status}")


def results(tree: str) -> Iterator[tuple[str, Result]]:
    """Yields the results of earlier runs on the same tree."""
    for step in STEPS:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
            found = msgspec.json.decode((WORK / f"{step.name}.json").read_bytes(), type=Result)
            if found.tree == tree:
                yield step.name, found


def table_of(done: Mapping[str, Result]) -> Table:
    table = Table("step", "result", "minutes", "what it proved")
    table.columns[2].justify = "right"
    for step in STEPS:
        if (result := done.get(step.name)) is None:
            table.add_row(step.name, "not run", "", step.about, style="dim")
            continue
        ended = "passed" if result.passed else "FAILED"
        minutes = f"{result.seconds / 60:.1f}"
        table.add_row(
            step.name, ended, minutes, result.proved, style=None if result.passed else "red"
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="make verify", description=__doc__)
    parser.add_argument(
        "--step", action="append", choices=[step.name for step in STEPS], help="run only these"
    )
    parser.add_argument("--again", action="store_true", help="repeat steps that have passed")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    options = parser.parse_args()
    console = Console()
    WORK.mkdir(parents=True, exist_ok=True)
    tree = digest_of_tree()
    done = dict(results(tree))
    wanted = [step for step in STEPS if options.step is None or step.name in options.step]
    for step in () if options.list else wanted:
        if step.name in done and done[step.name].passed and not options.again:
            console.print(f"{step.name}: has passed on this tree")
            continue
        result = done[step.name] = run(step, tree, console)
        (WORK / f"{step.name}.json").write_bytes(msgspec.json.encode(result))
        console.print(f"{step.name}: {'passed' if result.passed else 'FAILED'}, {result.proved}")
        if not result.passed:
            log = WORK / f"{step.name}.log"
            for line in log.read_text(errors="replace").splitlines()[-_TAIL:]:
                console.print(f"  {line}", markup=False, highlight=False, style="dim")
            console.print(f"  log: {log.relative_to(ROOT)}")
    console.print(table_of(done))
    if digest_of_tree() != tree:
        console.print("the tree has changed during the run: run it again", style="red")
        return 1
    return 0 if all(s.target in done and done[s.target].passed for s in wanted) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("make verify: interrupted; steps that have passed are not run again")
