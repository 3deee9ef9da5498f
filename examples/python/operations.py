"""Runs a small fleet, sends it requests, shows it, and drains a worker while requests go on.

    python examples/python/operations.py [REQUESTS]

Everything is a `kvxfer` command on a free port of 127.0.0.1, with its log in a temporary folder.
Your programs can read a fleet in the same way, by `kvxfer.client`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvxfer.client import InstanceState, SyncControlPlaneClient
from kvxfer.errors import UnknownInstance

MODEL = "kvxfer-demo-8l"  # the reference engine's, with random weights
PROMPT = "Once upon a time there was a cache that had to be somewhere else. " * 3
START_SECONDS = 120.0


@contextlib.contextmanager
def running(folder: Path, name: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """Runs a `kvxfer` command. Gives what it prints about itself once it serves."""
    command = [sys.executable, "-m", "kvxfer.cli", *arguments, "--json"]
    with (folder / f"{name}.log").open("w") as log:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    assert program.stdout is not None
    try:
        line = program.stdout.readline()
        if not line:
            raise SystemExit(f"{name} did not start:\n{(folder / f'{name}.log').read_text()}")
        yield json.loads(line)
    finally:
        program.terminate()
        program.wait()
        program.stdout.close()


def ask(router: str, number: int) -> int:
    """Sends a prompt. Returns the number of output tokens."""
    body = {"model": MODEL, "prompt": f"{number}. {PROMPT}", "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        f"{router}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-ID": f"example-{number}"},
    )
    with urllib.request.urlopen(request) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def until_ready(client: SyncControlPlaneClient, count: int) -> None:
    give_up = time.monotonic() + START_SECONDS
    while len(client.instances(state=InstanceState.READY)) < count:
        if time.monotonic() > give_up:
            raise SystemExit(f"{count} workers were not ready within {START_SECONDS:g} s")
        time.sleep(0.1)


def show(client: SyncControlPlaneClient) -> None:
    for one in sorted(client.instances(), key=lambda each: each.instance_id):
        load = one.load
        print(
            f"{one.instance_id:10} {one.state.value:8} running {load.running}, "
            f"free {load.free_blocks} of {one.num_blocks} blocks"
        )


def drain(client: SyncControlPlaneClient, instance_id: str) -> None:
    """Drains an instance: it gets nothing new, finishes what it has, and leaves."""
    client.drain(instance_id, deadline_seconds=60.0)
    with contextlib.suppress(UnknownInstance):
        while client.instance(instance_id):
            time.sleep(0.1)


def main(requests: int) -> None:
    os.environ["KVXFER_CLUSTER_KEY"] = secrets.token_hex(32)
    with contextlib.ExitStack() as fleet:
        folder = Path(fleet.enter_context(tempfile.TemporaryDirectory()))
        control = fleet.enter_context(running(folder, "control", "serve", "--port", "0"))
        os.environ["KVXFER_CONTROL_PLANE"] = control["url"]
        client = fleet.enter_context(SyncControlPlaneClient(control["url"]))
        for name in ("prefill-1", "decode-1", "decode-2"):
            options = ("--role", name.partition("-")[0], "--instance-id", name, "--threads", "1")
            fleet.enter_context(running(folder, name, "worker", *options, "--blocks", "128"))
        router = fleet.enter_context(running(folder, "router", "router", "--port", "0"))["url"]
        until_ready(client, 3)

        pool = fleet.enter_context(ThreadPoolExecutor(requests))
        tokens = sum(pool.map(lambda number: ask(router, number), range(requests)))
        print(f"{requests} requests at once: {tokens} tokens")
        show(client)

        going_on = [pool.submit(ask, router, number) for number in range(requests, 2 * requests)]
        drain(client, "decode-2")
        tokens = sum(each.result() for each in going_on)
        print(f"decode-2 has left, and {requests} requests meanwhile: {tokens} tokens")
        show(client)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 6)
