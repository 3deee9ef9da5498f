"""A disaggregated pair behind the router, and an aggregated server, all on one host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.vllm.notes import NOTES_VARIABLE
from tests.vllm.servers import Server, kvxfer, make_model, vllm

_READY_SECONDS = 60.0
# 32 KiB of cache per token: 64 MiB at 2,000 tokens, as models have that people serve.
_SIZES = ("--layers", "8", "--kv-heads", "8", "--head-dim", "64")
_CACHE = ("--kv-cache-memory-bytes", str(512 << 20))
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cluster:
    router: Server
    prefill: Server
    decode: Server
    aggregated: Server
    notes: Path
    """What the timed connector has noted."""


@contextlib.contextmanager
def started(folder: Path, step: Callable[[str], None]) -> Iterator[Cluster]:
    """All of it, ready to serve."""
    notes = folder / "notes"
    os.environ[NOTES_VARIABLE] = str(notes)
    step("making the model")
    model = make_model(folder, *_SIZES)
    step("starting two vLLM servers with kvxfer and one without")
    with contextlib.ExitStack() as stack:
        serve = stack.enter_context(kvxfer("serve", folder, "serve", "--allow-anonymous"))
        serve.wait("/healthz")
        router = stack.enter_context(
            kvxfer(
                *("router", folder, "router", "--allow-anonymous"),
                *("--control-plane", serve.url, "--attempts", "1"),
            )
        )
        prefill, decode = (
            stack.enter_context(
                vllm(
                    name,
                    folder,
                    model,
                    *_CACHE,
                    transfer={
                        "kv_connector": "TimedConnector",
                        "kv_connector_module_path": "benchmarks.vllm.timed_connector",
                        "kv_role": role,
                        "kv_connector_extra_config": {
                            "control_plane": serve.url,
                            # Seven processes on the cores of one: time is measured, not stalls.
                            "peer_timeout": 5.0,
                        },
                    },
                )
            )
            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
        )
        aggregated = stack.enter_context(vllm("aggregated", folder, model, *_CACHE))
        for server in (prefill, decode, aggregated):
            server.wait()
        router.wait("/healthz")
        _wait_until_ready(serve)
        yield Cluster(router, prefill, decode, aggregated, notes)


def cpu_seconds(server: Server) -> float:
    """User and system time of all processes of a server so far."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) == server.process.pid:  # the process group
                total += (int(fields[11]) + int(fields[12])) / _TICKS
    if not total:
        raise RuntimeError(f"no process of {server.name} was found")
    return total


def _wait_until_ready(serve: Server) -> None:
    give_up = time.monotonic() + _READY_SECONDS
    while True:
        fleet = httpx.get(serve.url + "/v1/instances").json()["instances"]
        if [each["state"] for each in fleet] == ["ready", "ready"]:
            return
        if time.monotonic() > give_up:
            raise RuntimeError(f"after {_READY_SECONDS:g} s the fleet is {fleet}")
        time.sleep(0.1)
