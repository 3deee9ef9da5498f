"""One run: prompts of each length, in each mode in turn, one at a time."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx2

from benchmarks.cpu import cpu_seconds
from benchmarks.vllm.cluster import Cluster, started
from benchmarks.vllm.figures import (
    QUIET,
    ForwardThread,
    Mode,
    Sample,
    Split,
    VllmReport,
    figures_of,
    verdicts_of,
)
from benchmarks.vllm.notes import BUSY, forwards, read
from kvxfer.bench.machine import this_machine
from kvxfer.bench.targets import VLLM_CROWD, VLLM_PROMPT_TOKENS
from verify.polling import wait_until
from verify.processes.programs import Server

_PULL: Final = {"do_remote_decode": True, "do_remote_prefill": False}
Step = Callable[[str], None]

# The pause between two requests, in which the work of the first one ends.
_PAUSE_SECONDS: Final = 0.1
_SETTLE_SECONDS: Final = 2.0
_WARM_UP_ROUNDS: Final = 2
_WARM_UP_TOKENS: Final = 200
# The prompts of a crowd, which are computed in one step.
_CROWD_TOKENS: Final = 30
_CROWD_TRIES: Final = 8
# The tiny model's vocabulary without its special tokens.
_VOCABULARY: Final = range(3, 512)


@dataclass(frozen=True, slots=True)
class Settings:
    lengths: tuple[int, ...] = (500, VLLM_PROMPT_TOKENS, 3500)
    rounds: int = 16
    idle_seconds: float = 10.0
    wait_seconds: float = 10.0
    seed: int = 0


def run_bench(settings: Settings, step: Step) -> VllmReport:
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-bench-") as folder,
        started(Path(folder), step) as cluster,
    ):
        step("starting a pair with kvxfer")
        cluster.start_pair(quiet=False)
        step(f"idle for {settings.idle_seconds:g} s")
        idle = _idle(cluster, settings.idle_seconds)
        step(f"one push waits for {settings.wait_seconds:g} s")
        waiting = {"workers do not wait": _waiting(cluster, f"bench{BUSY}0", settings.wait_seconds)}
        waiting["workers wait"] = _waiting(cluster, "bench-waits-0", settings.wait_seconds)
        step("starting the pair again, with readers that sleep")
        cluster.start_pair(quiet=True)
        samples = _rounds(cluster, [Mode.AGGREGATED, Mode.PUSH, Mode.PULL], settings, step)
        step(f"one push waits for {settings.wait_seconds:g} s")
        waiting[QUIET] = _waiting(cluster, "bench-waits-1", settings.wait_seconds)
        step(f"{VLLM_CROWD} requests at once")
        forward_thread = _forward_thread(cluster, settings.seed)
        step("starting a pair with NixlConnector")
        cluster.start_nixl_pair()
        samples += _rounds(cluster, [Mode.NIXL], settings, step)
    return VllmReport(
        started_at=started_at,
        machine=machine,
        rounds=settings.rounds,
        figures=figures_of(samples),
        forward_thread=forward_thread,
        idle_cores=idle,
        waiting_cores=waiting,
        samples=samples,
        verdicts=verdicts_of(samples, forward_thread, idle, waiting),
    )


def _rounds(
    cluster: Cluster, modes: Sequence[Mode], settings: Settings, step: Step
) -> list[Sample]:
    """Measures the modes in random order within a round, one request at a time."""
    rng = random.Random(settings.seed)
    asked: list[tuple[int, int, Mode, str, float, float]] = []
    with httpx2.Client(trust_env=False, timeout=60.0) as http:
        for number in range(-_WARM_UP_ROUNDS, settings.rounds):
            of = f"round {number + 1} of {settings.rounds}" if number >= 0 else "warming up"
            step(f"{', '.join(modes)}: {of}")
            for length in settings.lengths:
                for mode in rng.sample(modes, k=len(modes)):
                    request_id = f"bench-{mode.name}{length}-{number + _WARM_UP_ROUNDS}"
                    time.sleep(_PAUSE_SECONDS)
                    # The first request of an idle server includes the wake-up.
                    for asked_for, tokens in (("warm-up", _WARM_UP_TOKENS), (request_id, length)):
                        prompt = rng.choices(_VOCABULARY, k=tokens)
                        try:
                            began, first = _first_token(http, cluster, mode, asked_for, prompt)
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
    http: httpx2.Client, cluster: Cluster, mode: Mode, request_id: str, prompt: list[int]
) -> tuple[float, float]:
    """Sends a request. Returns the times when it was sent and when its first token came. Push goes
    through kvxfer's router. For pull this function is the proxy."""
    headers = {"X-Request-ID": request_id}
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "temperature": 0, "max_tokens": 2}
    body["ignore_eos"] = True
    began = time.monotonic()
    url = (cluster.aggregated if mode is Mode.AGGREGATED else cluster.router).url
    if mode in (Mode.PULL, Mode.NIXL):
        url = cluster.decode.url
        asked = {**body, "max_tokens": 1, "kv_transfer_params": _PULL}
        prefilled = http.post(
            cluster.prefill.url + "/v1/completions", json=asked, headers=headers
        ).raise_for_status()
        body["kv_transfer_params"] = prefilled.json()["kv_transfer_params"]
    with http.stream(
        "POST", url + "/v1/completions", json={**body, "stream": True}, headers=headers
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


def _forward_thread(cluster: Cluster, seed: int) -> ForwardThread:
    """Measures prompts that arrive while a long one is computed, and are computed in one step after
    it."""
    rng = random.Random(seed)

    def ask(tokens: int) -> None:
        body = {"model": "tiny", "prompt": rng.choices(_VOCABULARY, k=tokens), "max_tokens": 1}
        url = cluster.router.url + "/v1/completions"
        httpx2.post(url, json=body, timeout=60.0).raise_for_status()

    for _ in range(_CROWD_TRIES):
        with concurrent.futures.ThreadPoolExecutor(VLLM_CROWD + 1) as threads:
            asked = [threads.submit(ask, VLLM_PROMPT_TOKENS)]
            time.sleep(_PAUSE_SECONDS)
            asked += [threads.submit(ask, _CROWD_TOKENS) for _ in range(VLLM_CROWD)]
        for one in asked:
            one.result()
    largest = max(forwards(cluster.notes), key=lambda forward: forward.requests)
    of = [one for one in forwards(cluster.notes) if one.requests == largest.requests]
    return ForwardThread(
        requests=largest.requests,
        layer=median(one.layer for one in of) * 1e6,
        before=median(one.before for one in of) / largest.requests * 1e6,
    )


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
    """Returns the share of one core that both servers use while decode waits for a prompt that
    prefill never gets."""
    opened = httpx2.post(
        cluster.fleet.url + "/v1/transfers", json={"request_id": request_id, "model": "tiny"}
    ).raise_for_status()
    pair = opened.json()
    params = {
        "ticket": pair["ticket"],
        "prefill_engine_address": pair["prefill"]["engine_address"],
    }
    body = {"model": "tiny", "prompt": list(_VOCABULARY)[:_WARM_UP_TOKENS], "max_tokens": 1}
    with (
        httpx2.Client(trust_env=False, timeout=3 * seconds) as http,
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
    """Returns the share of one core that each idle server uses."""
    time.sleep(_SETTLE_SECONDS)
    return _used((cluster.aggregated, cluster.prefill, cluster.decode), seconds)


def _used(servers: Sequence[Server], seconds: float) -> dict[str, float]:
    """Returns the servers' shares of one core."""
    before = {server.name: cpu_seconds(server) for server in servers}
    begun = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - begun
    return {server.name: (cpu_seconds(server) - before[server.name]) / passed for server in servers}
