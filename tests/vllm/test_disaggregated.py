"""Tests that clients of a disaggregated vLLM get the tokens of an aggregated one, or a named
error."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
import uuid
from pathlib import Path

import httpx2
import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.ticket import Ticket, sign_ticket
from verify.polling import wait_until
from verify.processes.vllm.servers import add_vllm
from verify.processes.vllm.tiny_prompts import prompts

from .conftest import CLUSTER_KEY, LEASE_SECONDS, Cluster, settings

# Servers of vLLM start in a minute or two; nothing here measures time.
pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]


def test_tokens_are_those_of_an_aggregated_server(cluster: Cluster, rng: random.Random) -> None:
    asked = prompts(rng, 200)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        apart = list(threads.map(lambda prompt: cluster.tokens(cluster.router, prompt), asked))
        whole = list(threads.map(lambda prompt: cluster.tokens(cluster.aggregated, prompt), asked))
    different = [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b]
    assert not different
    received = cluster.decode.metric("vllm:external_prefix_cache_hits_total")
    assert received > sum(map(len, asked)) / 4, "decode has computed prompts itself"
    cluster.wait_until_idle(cluster.prefill, cluster.decode)


def test_blocks_are_free_again_when_clients_leave(cluster: Cluster, rng: random.Random) -> None:
    def leave(prompt: list[int]) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        seconds = random.Random(len(prompt)).uniform(0.01, 1.0)
        with contextlib.suppress(httpx2.TimeoutException):
            httpx2.post(cluster.router.url + "/v1/completions", json=body, timeout=seconds)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        list(threads.map(leave, prompts(rng, 40)))
    cluster.wait_until_idle(cluster.prefill, cluster.decode)
    prompt = prompts(rng, 1)[0]
    assert cluster.tokens(cluster.router, prompt) == cluster.tokens(cluster.aggregated, prompt)


def test_transfers_are_in_the_metrics_of_both_servers(cluster: Cluster, rng: random.Random) -> None:
    ways = ((cluster.prefill, "send"), (cluster.decode, "receive"))

    def totals() -> list[list[float]]:
        names = ("transfers_total", "transfer_blocks_total", "transfer_bytes_total")
        names += ("transfer_seconds_count",)
        good = {"transfers_total": {"outcome": "delivered"}}
        return [
            [
                server.metric(f"vllm:kvxfer_{name}", direction=way, **good.get(name, {}))
                for name in names
            ]
            for server, way in ways
        ]

    before = totals()
    for _ in range(3):
        cluster.tokens(cluster.router, [rng.randrange(3, 512) for _ in range(300)])
    cluster.wait_until_idle(cluster.prefill, cluster.decode)
    # 300 tokens are 3 blocks of 128: 4 layers, K and V of 2 heads of 32 floats.
    block = 128 * 4 * 2 * 2 * 32 * 4
    grown = [
        [now - was for now, was in zip(*side, strict=True)]
        for side in zip(totals(), before, strict=True)
    ]
    assert grown == [[3, 9, 9 * block, 3]] * 2


def test_the_control_plane_knows_the_prompts_that_prefill_has_cached(
    cluster: Cluster, rng: random.Random
) -> None:
    prompt = [rng.randrange(3, 512) for _ in range(1000)]
    assert cluster.fleet.instances()["prefill"].labels["prefixes"] == "guessed"
    assert cluster.cached_tokens(prompt) == 0
    cluster.tokens(cluster.router, prompt)
    # The next heartbeat reports it.
    told = wait_until(lambda: cluster.cached_tokens(prompt), pause=0.1)
    assert told == 7 * 128, "prefill has 7 whole blocks of it"


def expired_ticket() -> str:
    return sign_ticket(
        Ticket(uuid.uuid4().hex, "request", "prefill", 1, "decode", 1, SYSTEM_CLOCK.unix() - 60),
        CLUSTER_KEY,
    )


def test_an_expired_ticket_gives_an_error_and_no_tokens(
    cluster: Cluster, rng: random.Random
) -> None:
    params = cluster.open_transfer("expired") | {"ticket": expired_ticket()}
    answer = cluster.ask(cluster.decode, prompts(rng, 1)[0], kv_transfer_params=params)
    assert answer.status_code == 500
    assert "expired 60." in cluster.decode.tail()
    cluster.wait_until_idle(cluster.decode)
    outcome = {"direction": "receive", "outcome": "ticket-expired"}
    assert cluster.decode.metric("vllm:kvxfer_transfers_total", **outcome) == 1
    cluster.wait_until_idle(cluster.decode)


def test_the_ticket_of_another_prompt_gives_an_error_and_no_tokens(
    cluster: Cluster, rng: random.Random
) -> None:
    params = cluster.open_transfer("swapped")
    ours, theirs = ([rng.randrange(3, 512) for _ in range(300)] for _ in range(2))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        prefill = threads.submit(
            cluster.ask, cluster.prefill, theirs, max_tokens=1, kv_transfer_params=params
        )
        answer = cluster.ask(cluster.decode, ours, kv_transfer_params=params)
        assert prefill.result().is_success
    assert answer.status_code == 500
    assert "prefill computed another prompt" in cluster.decode.tail()
    cluster.wait_until_idle(cluster.prefill, cluster.decode)


def test_with_recompute_a_failed_transfer_still_gives_the_right_tokens(
    cluster: Cluster, rng: random.Random, model: Path
) -> None:
    params = cluster.open_transfer("recomputed")
    how = {"role": "kv_consumer", "policy": "recompute", **settings()}
    recomputing = add_vllm(cluster.fleet, "recomputing", model, **how)
    try:
        recomputing.serves("/health")
        for prompt in prompts(rng, 5):
            # One ticket is for another instance, one has expired.
            for ticket in (params["ticket"], expired_ticket()):
                tokens = cluster.tokens(
                    recomputing, prompt, kv_transfer_params=params | {"ticket": ticket}
                )
                assert tokens == cluster.tokens(cluster.aggregated, prompt)
        cluster.wait_until_idle(recomputing)
    finally:
        cluster.fleet.end("recomputing")


@pytest.mark.realtime
def test_a_killed_producer_ends_the_requests_that_wait_for_it(
    cluster: Cluster, rng: random.Random
) -> None:
    """Runs last, as the producer is restarted under its name."""
    kept = [rng.randrange(3, 512) for _ in range(300)]
    asked = [[rng.randrange(3, 512) for _ in range(3500)] for _ in range(6)]
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(cluster.ask, cluster.router, prompt) for prompt in asked]
        params = cluster.keep(kept)
        cluster.prefill.kill()
        killed = time.monotonic()
        for prompt, answer in zip(asked, answers, strict=True):
            if answer.result().is_success:
                [choice] = answer.result().json()["choices"]
                assert choice["token_ids"] == cluster.tokens(cluster.aggregated, prompt)
            else:
                assert answer.result().json()["error"]["code"] != "error"
    assert time.monotonic() - killed < LEASE_SECONDS
    assert any(not answer.result().is_success for answer in answers)
    cluster.wait_until_idle(cluster.decode)
    cluster.prefill.start()
    cluster.wait_until_ready()
    # The prompt kept by the killed producer is lost, and the new one answers right.
    assert cluster.ask(cluster.decode, kept, kv_transfer_params=params).status_code == 500
    for prompt in (kept, asked[0]):
        assert cluster.tokens(cluster.router, prompt) == cluster.tokens(cluster.aggregated, prompt)
