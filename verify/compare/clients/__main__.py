"""Runs a short session of each client against one aggregated vLLM and against the router over a
pair: the client has to get the same from both. `make test SUITE=clients` calls it.

Exit code 1 if a client fails, or gets something else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from verify.compare.openai.servers import SETUPS, Compared, serving
from verify.processes.process import ProcessFailed
from verify.processes.vllm.servers import VLLM_PYTHON

HERE: Final = Path(__file__).parent
CLIENTS_PYTHON: Final = os.environ.get("KVXFER_CLIENTS_PYTHON", "")

_SECONDS: Final = 300
_TAIL: Final = 2000
# A client must not see the rest of the environment.
_VARIABLES: Final = {
    **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Client:
    """A program of the folder `programs`, and the Python that has its package."""

    name: str
    program: str
    python: str = CLIENTS_PYTHON


CLIENTS: Final = (
    Client("openai", "openai_sync.py"),
    Client("openai, asyncio", "openai_async.py"),
    Client("anthropic", "anthropic_messages.py"),
    Client("langchain-openai", "langchain_chains.py"),
    Client("litellm", "litellm_calls.py"),
    Client("lm-eval", "lm_eval_task.py"),
    Client("guidellm", "guidellm_run.py"),
    Client("vllm.benchmarks.serve", "vllm_bench.py", VLLM_PYTHON),
)


class ClientFailed(Exception):
    """A client failed. The text is the end of its output."""


def session(client: Client, url: str, model: Path) -> dict[str, Any]:
    """Runs a client's session. Returns its report."""
    command = [client.python, str(HERE / "programs" / client.program), url, str(model)]
    done = subprocess.run(
        command, env=_VARIABLES, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise ClientFailed(done.stderr[-_TAIL:])
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*ours["results"], *theirs["results"]}):
        got, wanted = (each["results"].get(name) for each in (ours, theirs))
        if got != wanted:
            yield f"{name}: {got!r:.300}, not {wanted!r:.300}"


def compared(client: Client, servers: Compared, table: Table) -> list[str]:
    """Compares a client's sessions. Returns the problems, and adds a row to the table."""
    moved = servers.received_tokens()
    try:
        theirs = session(client, servers.aggregated.url, servers.model)
        ours = session(client, servers.fleet.router.url, servers.model)
    except (ClientFailed, subprocess.TimeoutExpired) as failure:
        table.add_row(client.name, "", str(failure)[-200:], "", "failed", style="red")
        return [f"{client.name}: {failure}"]
    found = [f"{client.name}: {each}" for each in differences(ours, theirs)]
    tokens = f"{servers.received_tokens() - moved:,.0f}"
    result = "different" if found else "equal"
    style = "red" if found else None
    table.add_row(client.name, ours["version"], ours["did"], tokens, result, style=style)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test SUITE=clients", description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--client", action="append", choices=names, help="run only these")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    options = parser.parse_args()
    console = Console()
    table = Table("client", "version", "what it did", "tokens moved", "results")
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvxfer-clients-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        setup = SETUPS[0]
        wanted = [each for each in CLIENTS if options.client is None or each.name in options.client]
        try:
            with contextlib.ExitStack() as stack:
                with console.status("starting vLLM"):
                    servers = stack.enter_context(serving(folder, setup, second=False))
                for client in wanted:
                    with console.status(client.name):
                        problems += compared(client, servers, table)
        except ProcessFailed as failed:
            problems.append(f"{failed}; for the servers' logs, run it with --logs FOLDER")
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False, highlight=False, style="red")
    if not problems:
        console.print(f"proved: {table.row_count} clients got the same from both")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
