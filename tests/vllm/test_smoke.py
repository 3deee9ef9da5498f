"""The connector with the real vLLM in a few minutes, for CI: `make test SUITE=vllm-smoke`."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from verify.polling import wait_until
from verify.processes.vllm.tiny_prompts import prompts
from verify.stability import descendants

from .conftest import Cluster
from .test_pull import fetched, proxied, random_prompt

pytestmark = [pytest.mark.realtime, pytest.mark.timeout(900)]

PROMPTS: Final = 20


def pushed(cluster: Cluster, prompt: list[int]) -> list[int]:
    return cluster.tokens(cluster.router, prompt)


@pytest.mark.parametrize("tokens", [pushed, proxied], ids=["push", "pull"])
def test_tokens_are_those_of_a_plain_server(
    cluster: Cluster, rng: random.Random, tokens: Callable[[Cluster, list[int]], list[int]]
) -> None:
    asked, before = prompts(rng, PROMPTS), fetched(cluster.decode)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        apart = list(threads.map(lambda prompt: tokens(cluster, prompt), asked))
        whole = list(threads.map(lambda prompt: cluster.tokens(cluster.aggregated, prompt), asked))
    assert apart == whole
    received = fetched(cluster.decode) - before
    assert received > sum(map(len, asked)) / 4, "decode has computed prompts itself"
    cluster.wait_until_idle(cluster.prefill, cluster.decode)


def test_decode_maps_the_cache_of_prefill(cluster: Cluster) -> None:
    """Runs after transfers."""
    shared = [
        line
        for pid in descendants(cluster.decode.pid)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if " r--s " in line and "/memfd:kvxfer (deleted)" in line
    ]
    assert shared


def test_the_error_names_a_killed_prefill(cluster: Cluster, rng: random.Random) -> None:
    """Runs last, as prefill is not restarted."""
    prompt, lost = random_prompt(rng, 1000), {"direction": "receive", "outcome": "peer-lost"}
    assert cluster.decode.metric("vllm:kvxfer_transfers_total", **lost) == 0
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        # Decode waits for a prompt that prefill is never asked for.
        params = cluster.ticket("prefill", "decode")
        answer = threads.submit(cluster.ask, cluster.decode, prompt, kv_transfer_params=params)
        wait_until(lambda: cluster.decode.metric("vllm:num_requests_waiting"))
        cluster.prefill.kill()
    assert answer.result().status_code == 500
    assert cluster.decode.metric("vllm:kvxfer_transfers_total", **lost) == 1
    assert "is not received: peer 'prefill'" in cluster.decode.tail()
    cluster.wait_until_idle(cluster.decode)
