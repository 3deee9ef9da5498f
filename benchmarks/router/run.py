"""One run: requests one at a time on an idle fleet, then streams over the router and over the
pass-through in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec

from benchmarks.control.generator import request
from benchmarks.router import requests
from benchmarks.router.client import Connection, connected
from benchmarks.router.figures import (
    DECODE,
    OPEN,
    PASS_THROUGH,
    PREFILL,
    ROUTER,
    TOKENIZE,
    Round,
    RouterReport,
    latency,
    stream_figure,
    verdicts_of,
)
from benchmarks.router.fleet import RouterFleet
from kvxfer.bench.machine import this_machine
from verify.processes.cores import on_cores, split_cores
from verify.processes.fleet import CONTROL_PLANE

# The part of a stream's time over which the streams of a round begin.
_RAMP: Final = 0.4
# Pauses in which the work of a round, or of a request, ends before the next one begins.
_PAUSE_SECONDS: Final = 0.2
_REST_SECONDS: Final = 0.01
_WARM_UP: Final = 5
_CREATED, _OK, _GONE = 201, 200, 204

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int = 8
    streams: int = 96
    tokens: int = 256
    """The tokens of each stream."""
    rate: float = 50.0
    """Tokens per second of each stream."""
    requests: int = 200
    """Requests of each kind, one at a time."""


def run_bench(settings: Settings, step: Step) -> RouterReport:
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    core, others = split_cores()
    with on_cores(others), RouterFleet(settings.rate, core) as fleet:
        rounds, seconds = asyncio.run(_measure(settings, fleet, step))
    latencies = {name: latency(each) for name, each in seconds.items()}
    return RouterReport(
        started_at=started_at,
        machine=machine,
        rounds=settings.rounds,
        streams=settings.streams,
        tokens=settings.tokens,
        rate=settings.rate,
        figures={name: stream_figure(each, settings.rate) for name, each in rounds.items()},
        latencies=latencies,
        verdicts=verdicts_of(rounds, latencies),
    )


async def _measure(
    settings: Settings, fleet: RouterFleet, step: Step
) -> tuple[dict[str, list[Round]], dict[str, list[float]]]:
    """Returns the rounds of each server, and the seconds of requests one at a time by what was
    asked."""
    step("requests one at a time")
    seconds = await _one_by_one(fleet, settings.requests)
    rounds: dict[str, list[Round]] = {ROUTER: [], PASS_THROUGH: []}
    async with AsyncExitStack() as stack:
        connections = {
            name: await stack.enter_async_context(
                connected(fleet.running[name].url, settings.streams)
            )
            for name in rounds
        }
        for number in range(settings.rounds):
            for name in reversed(rounds) if number % 2 else rounds:
                rounds[name].append(await _round(settings, fleet, name, connections[name]))
            step(f"round {number + 1} of {settings.rounds}")
    return rounds, seconds


# --- streams -------------------------------------------------------------------------------------


async def _round(
    settings: Settings, fleet: RouterFleet, name: str, connections: Sequence[Connection]
) -> Round:
    """Sends whole requests on all connections. Each begins a moment after the one before."""

    def tokens() -> int:
        return sum(each.answer.tokens for each in connections)

    between = _RAMP * settings.tokens / settings.rate / len(connections)
    began, client_cpu, cpu = time.perf_counter(), time.process_time(), fleet.cpu_seconds(name)
    async with asyncio.TaskGroup() as beginning:
        for number, connection in enumerate(connections, start=1):
            content = requests.completion(settings.tokens)
            beginning.create_task(connection.begin(content))
            await asyncio.sleep(began + number * between - time.perf_counter())
    steady_tokens, steady_cpu = tokens(), fleet.cpu_seconds(name)
    await connections[0].finish()
    steady_tokens, steady_cpu = tokens() - steady_tokens, fleet.cpu_seconds(name) - steady_cpu
    if not steady_tokens:
        raise RuntimeError(
            f"{name}: the first stream ended before the last one began; the host is too busy for "
            "this, or streams are too short: use fewer --streams or more --tokens"
        )
    for connection in connections:
        (await connection.finish()).expect(_OK, settings.tokens)
    seconds, client_cpu = time.perf_counter() - began, time.process_time() - client_cpu
    await asyncio.sleep(_PAUSE_SECONDS)
    return Round(
        seconds=seconds,
        tokens=tokens(),
        parts=sum(each.answer.token_parts for each in connections),
        cpu_seconds=fleet.cpu_seconds(name) - cpu,
        steady_tokens=steady_tokens,
        steady_cpu_seconds=steady_cpu,
        client_cpu_seconds=client_cpu,
    )


# --- requests one at a time ----------------------------------------------------------------------


async def _one_by_one(fleet: RouterFleet, count: int) -> dict[str, list[float]]:
    """Returns the seconds of `count` requests of each kind: to the first byte of a stream, to the
    end of an answer in one piece."""
    streams = {ROUTER: ROUTER, PASS_THROUGH: PASS_THROUGH, DECODE: "decode"}
    pieces = {TOKENIZE: requests.tokenize, PREFILL: requests.prefill}
    found: dict[str, list[float]] = {name: [] for name in (*streams, OPEN, *pieces)}
    async with AsyncExitStack() as stack:
        to = {
            name: (await stack.enter_async_context(connected(server.url, 1)))[0]
            for name, server in fleet.running.items()
        }
        for _ in range(_WARM_UP + count):
            for name, server in streams.items():
                answer = await to[server].ask(requests.completion(1))
                found[name].append(answer.expect(_OK, 1).first_seconds)
                await asyncio.sleep(_REST_SECONDS)
            for name, content in pieces.items():
                answer = await to["prefill"].ask(content())
                found[name].append(answer.expect(_OK).seconds)
            found[OPEN].append(await _open(to[CONTROL_PLANE]))
    return {name: taken[_WARM_UP:] for name, taken in found.items()}


async def _open(control_plane: Connection) -> float:
    """Opens a transfer and releases it. Returns the seconds until it was open."""
    answer = (await control_plane.ask(requests.open_transfer())).expect(_CREATED)
    transfer_id = msgspec.json.decode(answer.body)["transfer_id"]
    path = f"/v1/transfers/{transfer_id}"
    (await control_plane.ask(request("DELETE", path))).expect(_GONE)
    return answer.seconds
