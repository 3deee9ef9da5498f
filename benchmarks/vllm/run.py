"""One run: prompts of each length, in each mode in turn, one at a time."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx

from benchmarks.vllm.cluster import Cluster, cpu_seconds, started
from benchmarks.vllm.figures import (
    QUIET,
    TARGET_TOKENS,
    Mode,
    Sample,
    Split,
    VllmReport,
    figures_of,
    visible_ratio,
)
from benchmarks.vllm.notes import BUSY, LATE, read
from kvxfer.bench.machine import this_machine
from verify.polling import wait_until
from verify.processes.programs import Server

Step = Callable[[str], None]

# Between two requests: what is left of the last one settles.
_PAUSE_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 2.0
_WARM_UP_ROUNDS: Final = 2
_WARM_UP_TOKENS: Final = 200
# What the tiny model knows, less its special tokens.
_VOCABULARY: Final = range(3, 512)


@dataclass(frozen=True, slots=True)
class Settings:
    lengths: tuple[int, ...] = (500, TARGET_TOKENS, 3500)
    rounds: int = 16
    idle_seconds: float = 10.0
    wait_seconds: float = 10.0
    seed: int = 0


def run_bench(settings: Settings, step: Step) -> VllmReport:
    load_average = os.getloadavg()[0]
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder,
        started(Path(folder), step) as cluster,
    ):
        samples = _rounds(cluster, settings, step)
        step(f"idle for {settings.idle_seconds:g} s")
        idle = _idle(cluster, settings.idle_seconds)
        step(f"one push waits for {settings.wait_seconds:g} s")
        waiting = {"before": _waiting(cluster, f"bench{BUSY}0", settings.wait_seconds)}
        waiting["now"] = _waiting(cluster, "bench-waits-0", settings.wait_seconds)
        step("starting the pair again, with readers that sleep")
        cluster.restart_quiet()
        step(f"one push waits for {settings.wait_seconds:g} s")
        waiting[QUIET] = _waiting(cluster, "bench-waits-1", settings.wait_seconds)
    return VllmReport(
        started_at=started_at,
        machine=this_machine(),
        load_average=load_average,
        rounds=settings.rounds,
        figures=figures_of(samples),
        visible_ratio=visible_ratio(samples, TARGET_TOKENS),
        idle_cores=idle,
        waiting_cores=waiting,
        samples=samples,
    )


def _rounds(cluster: Cluster, settings: Settings, step: Step) -> list[Sample]:
    rng = random.Random(settings.seed)
    asked: list[tuple[int, int, Mode, str, float, float]] = []
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        for number in range(-_WARM_UP_ROUNDS, settings.rounds):
            step(f"round {number + 1} of {settings.rounds}" if number >= 0 else "warming up")
            for length in settings.lengths:
                for mode in rng.sample(list(Mode), k=len(Mode)):
                    kind = LATE if mode is Mode.LATE else "-"
                    request_id = f"bench{kind}{length}-{number + _WARM_UP_ROUNDS}"
                    server = cluster.aggregated if mode is Mode.AGGREGATED else cluster.router
                    time.sleep(_PAUSE_SECONDS)
                    # A server that was idle pays for waking with its first request.
                    for asked_for, tokens in (("warm-up", _WARM_UP_TOKENS), (request_id, length)):
                        prompt = rng.choices(_VOCABULARY, k=tokens)
                        try:
                            began, first = _first_token(http, server.url, asked_for, prompt)
                        except RuntimeError as error:
                            logs = (cluster.prefill.tail(2000), cluster.decode.tail(2000))
                            raise RuntimeError("\n".join([str(error), *logs])) from None
                    asked.append((number, length, mode, request_id, began, first))
    notes = read(cluster.notes)
    return [
        Sample(
            number,
            length,
            mode,
            (first - began) * 1e3,
            None if mode is Mode.AGGREGATED else _split(notes[request_id], began, first),
        )
        for number, length, mode, request_id, began, first in asked
        if number >= 0
    ]


def _first_token(
    http: httpx.Client, url: str, request_id: str, prompt: list[int]
) -> tuple[float, float]:
    """When a request was sent, and when its first token came."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    began = time.monotonic()
    with http.stream(
        "POST", url + "/v1/completions", json=body, headers={"X-Request-ID": request_id}
    ) as answer:
        if not answer.is_success:
            raise RuntimeError(f"{request_id} failed: {answer.read().decode()}")
        events = answer.iter_lines()
        next(event for event in events if '"choices"' in event)
        first = time.monotonic()
        for event in events:
            if '"error"' in event:
                raise RuntimeError(f"{request_id} failed: {event}")
    return began, first


def _split(notes: Mapping[tuple[str, str], float], began: float, first: float) -> Split:
    moments = [
        began,
        notes["prefill", "scheduled"],
        notes["prefill", "computed"],
        notes["decode", "scheduled"],
        first,
    ]
    return Split(*(1e3 * (end - begin) for begin, end in itertools.pairwise(moments)))


def _waiting(cluster: Cluster, request_id: str, seconds: float) -> float:
    """The share of one core that both servers take while decode waits for a prompt which prefill is
    not asked for."""
    opened = httpx.post(
        cluster.fleet.url + "/v1/transfers", json={"request_id": request_id, "model": "tiny"}
    ).raise_for_status()
    pair = opened.json()
    params = {
        "ticket": pair["ticket"],
        "prefill_engine_address": pair["prefill"]["engine_address"],
    }
    body = {"model": "tiny", "prompt": list(_VOCABULARY)[:_WARM_UP_TOKENS], "max_tokens": 1}
    with (
        httpx.Client(trust_env=False, timeout=3 * seconds) as http,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(
            http.post,
            cluster.decode.url + "/v1/completions",
            json={**body, "kv_transfer_params": params},
            headers={"X-Request-ID": request_id},
        )
        wait_until(lambda: cluster.decode.metric("vllm:num_requests_waiting"))
        time.sleep(_SETTLE_SECONDS)
        used = _used((cluster.prefill, cluster.decode), seconds)
        assert cluster.decode.metric("vllm:num_requests_waiting"), "the push did not wait so long"
        # The ticket's lease ends the request.
        wait_until(lambda: not cluster.decode.metric("vllm:num_requests_waiting"), 5 * seconds)
    return sum(used.values())


def _idle(cluster: Cluster, seconds: float) -> dict[str, float]:
    """The share of one core that each server takes with nothing to do."""
    time.sleep(_SETTLE_SECONDS)
    return _used((cluster.aggregated, cluster.prefill, cluster.decode), seconds)


def _used(servers: Sequence[Server], seconds: float) -> dict[str, float]:
    """Shares of one core."""
    before = {server.name: cpu_seconds(server) for server in servers}
    begun = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - begun
    return {server.name: (cpu_seconds(server) - before[server.name]) / passed for server in servers}
