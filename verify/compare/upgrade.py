"""Runs processes of an older revision beside those of this one, as in a fleet that is upgraded:
every request has to succeed, with the same tokens.

The router and the control plane have one revision; each worker has one or the other. Each mix also
drains a worker.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from kvxfer.cli.output import err, out
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server, clean_environment, http

ROOT: Final = Path(__file__).parents[2]
REQUESTS: Final = 12
_TOKENS: Final = 24
_START_SECONDS: Final = 120.0
_DRAIN_SECONDS: Final = 60.0
_PROMPT: Final = "The quick brown fox jumps over the lazy dog, and sleeps. " * 6


def built(revision: str) -> Path:
    """Builds a revision in build/upgrade, once. Returns its Python."""
    tree = ROOT / "build/upgrade" / revision
    stamp = tree / ".built"
    if not stamp.exists():
        shutil.rmtree(tree, ignore_errors=True)
        git = ["git", "-c", "advice.detachedHead=false"]
        subprocess.run([*git, "clone", "--quiet", "--no-checkout", ROOT, tree], check=True)
        subprocess.run([*git, "-C", tree, "checkout", "--quiet", revision], check=True)
        subprocess.run([tree / "scripts/setup", "test"], check=True)
        stamp.touch()
    return tree / ".venv/bin/python"


class Mixed(Fleet):
    """A fleet of processes of several revisions."""

    def __init__(self, pythons: dict[str, Path]) -> None:
        super().__init__()
        self._pythons = pythons

    def of(self, revision: str, name: str, *arguments: str, works: bool = False) -> Server:
        variables = {"KVXFER_CONTROL_PLANE": self.url, **self.variables}
        command = [self._pythons[revision], "-m", "kvxfer.cli", *arguments, "--json"]
        server = Server(
            *(name, *command), folder=self.folder, environment=clean_environment(**variables)
        )
        return self.add(server, works=works)


def run(pythons: dict[str, Path], serving: str, prefill: str, decode: str) -> list[str]:
    """Sends requests to a fleet with these revisions. Returns the texts of the answers."""
    with Mixed(pythons) as fleet:
        fleet.of(serving, "control-plane", "serve", "--port", str(fleet.port)).ready()
        for role, revision in (("prefill", prefill), ("decode", decode), ("decode", serving)):
            name = f"{role}-{len(fleet.running)}"
            arguments = ("worker", "--role", role, "--instance-id", name, "--threads", "1")
            fleet.of(revision, name, *arguments, works=True)
        router = fleet.of(serving, "router", "router", "--port", "0")
        wait_until(fleet.whole, _START_SECONDS)
        (model,) = {one.model for one in fleet.instances().values()}
        texts = [_complete(router.url, model, number) for number in range(REQUESTS)]
        leaving = "decode-2"
        fleet.of(serving, "drain", "drain", leaving).ends(_DRAIN_SECONDS)
        fleet.left(leaving, _DRAIN_SECONDS)
        return [*texts, _complete(router.url, model, 0)]


def _complete(url: str, model: str, number: int) -> str:
    body = {"model": model, "prompt": f"{number}: {_PROMPT}", "max_tokens": _TOKENS}
    answer = http().post(url + "/v1/completions", json={**body, "temperature": 0})
    if not answer.is_success:
        raise SystemExit(f"request {number}: {answer.status_code} {answer.text}")
    said: dict[str, Any] = answer.json()
    return str(said["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test SUITE=upgrade", description=__doc__)
    parser.add_argument("--revision", default="6298a4ab", help="the older one")
    options = parser.parse_args()
    pythons = {"old": built(options.revision), "new": ROOT / ".venv/bin/python"}
    expected = run(pythons, "new", "new", "new")
    mixes = [mix for mix in itertools.product(pythons, repeat=3) if len(set(mix)) > 1]
    for serving, prefill, decode in mixes:
        err.print(f"{serving} control plane and router, {prefill} prefill, {decode} decode")
        found = run(pythons, serving, prefill, decode)
        if found != expected:
            raise SystemExit(f"other tokens: {found} instead of {expected}")
    out.print(f"proved: {len(mixes)} mixes, {len(mixes) * (REQUESTS + 1)} requests, 0 failed")


if __name__ == "__main__":
    main()
