"""Requests that a pair with few KV blocks preempts, keeps waiting or cannot take."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from .conftest import Cluster, side
from .servers import Server, vllm
from .test_pull import SOON, fetched, random_prompt

pytestmark = pytest.mark.timeout(900)

# Eleven blocks are left for requests, and the longest needs eight.
_FEW = ("--max-model-len", "1024", "--num-gpu-blocks-override", "12")
# Two prompts are computed side by side.
_CHUNKS = ("--max-num-batched-tokens", "256", "--long-prefill-token-threshold", "128")


@dataclass
class Tight:
    prefill: Server
    decode: Server


@pytest.fixture(scope="module")
def tight(cluster: Cluster, folder: Path, model: Path) -> Iterator[Tight]:
    producer, consumer = (
        side(cluster.control_plane, role) for role in ("kv_producer", "kv_consumer")
    )
    with (
        vllm("tight-prefill", folder, model, *_FEW, *_CHUNKS, transfer=producer) as prefill,
        vllm("tight-decode", folder, model, *_FEW, transfer=consumer) as decode,
    ):
        for server in (prefill, decode):
            server.wait()
        cluster.wait_until_ready("tight-prefill", "tight-decode")
        yield Tight(prefill, decode)


def preemptions(server: Server) -> float:
    return server.metric("vllm:num_preemptions_total")


def test_a_prompt_that_prefill_preempts_is_kept_when_it_is_computed_again(
    cluster: Cluster, tight: Tight, rng: random.Random
) -> None:
    asked = [random_prompt(rng, length) for length in (900, 850)]
    before = preemptions(tight.prefill)

    def proxied(prompt: list[int]) -> list[int]:
        params = cluster.keep(prompt, tight.prefill)
        return cluster.tokens(tight.decode, prompt, kv_transfer_params=params)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        apart = list(threads.map(proxied, asked))
    assert preemptions(tight.prefill) > before
    assert apart == [cluster.tokens(cluster.aggregated, prompt) for prompt in asked]
    cluster.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_a_push_that_prefill_preempts_ends_with_an_error(
    cluster: Cluster, tight: Tight, rng: random.Random
) -> None:
    asked = [random_prompt(rng, length) for length in (900, 850)]
    before = preemptions(tight.prefill)

    def pushed(prompt: list[int]) -> httpx.Response:
        params = cluster.ticket("tight-prefill", "tight-decode")
        cluster.ask(tight.prefill, prompt, max_tokens=1, kv_transfer_params=params)
        return cluster.ask(tight.decode, prompt, kv_transfer_params=params)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(pushed, asked))
    assert preemptions(tight.prefill) > before
    assert any(not answer.is_success for answer in answers)
    for prompt, answer in zip(asked, answers, strict=True):
        if answer.is_success:
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == cluster.tokens(cluster.aggregated, prompt)
    assert "prefill has preempted the request" in tight.decode.tail()
    cluster.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_a_request_that_decode_preempts_is_computed_there_again(
    cluster: Cluster, tight: Tight, rng: random.Random
) -> None:
    asked = [random_prompt(rng, 600) for _ in range(2)]
    kept = [cluster.keep(prompt, tight.prefill) for prompt in asked]
    before = preemptions(tight.decode), fetched(tight.decode)

    def fetch(index: int) -> list[int]:
        return cluster.tokens(
            tight.decode, asked[index], max_tokens=400, kv_transfer_params=kept[index]
        )

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        apart = list(threads.map(fetch, range(2)))
    assert preemptions(tight.decode) > before[0]
    assert fetched(tight.decode) - before[1] == 1200, "both came from prefill, once"
    assert apart == [cluster.tokens(cluster.aggregated, prompt, max_tokens=400) for prompt in asked]
    cluster.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_prefill_lets_go_of_a_request_that_is_aborted_in_the_queue_of_decode(
    cluster: Cluster, tight: Tight, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 900)
    params = cluster.keep(prompt, tight.prefill)
    before = fetched(tight.decode)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        # It leaves too few blocks for the other one.
        running = threads.submit(
            cluster.tokens, tight.decode, random_prompt(rng, 600), max_tokens=420
        )
        while not tight.decode.metric("vllm:num_requests_running"):
            time.sleep(0.005)
        body = {"model": "tiny", "prompt": prompt, "kv_transfer_params": params}
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(tight.decode.url + "/v1/completions", json=body, timeout=0.3)
        running.result()
    cluster.wait_until_idle_within(SOON, tight.prefill, tight.decode)
    assert fetched(tight.decode) == before


def test_a_prompt_that_is_too_long_for_decode_is_an_error_and_prefill_lets_it_go(
    cluster: Cluster, tight: Tight, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 2000)
    params = cluster.keep(prompt)
    answer = cluster.ask(tight.decode, prompt, kv_transfer_params=params)
    assert answer.status_code == 400
    assert "maximum context length is 1024 tokens" in answer.text
    cluster.wait_until_idle_within(SOON, cluster.prefill)
