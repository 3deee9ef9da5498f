"""The protocol of vLLM's own proxies: prefill first, and decode fetches what it has kept."""

from __future__ import annotations

import concurrent.futures
import random
from typing import Any

import httpx2
import pytest

from verify.processes.programs import Server
from verify.processes.vllm.tiny_prompts import prompts

from .conftest import Cluster

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

# Long before a lease ends.
SOON = 8.0


def proxied(cluster: Cluster, prompt: list[int], **more: Any) -> list[int]:
    params = cluster.keep(prompt, **more)
    return cluster.tokens(cluster.decode, prompt, kv_transfer_params=params, **more)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(length)]


def fetched(server: Server) -> float:
    return server.metric("vllm:external_prefix_cache_hits_total")


def test_tokens_are_those_of_an_aggregated_server(cluster: Cluster, rng: random.Random) -> None:
    asked, before = prompts(rng, 200), fetched(cluster.decode)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        apart = list(threads.map(lambda prompt: proxied(cluster, prompt), asked))
        whole = list(threads.map(lambda prompt: cluster.tokens(cluster.aggregated, prompt), asked))
    different = [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b]
    assert not different
    assert fetched(cluster.decode) - before > sum(map(len, asked)) / 4
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)


def test_blocks_that_were_overwritten_after_the_lease_are_not_fetched(
    cluster: Cluster, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 1000)
    params = cluster.keep(prompt)
    assert cluster.prefill.metric("vllm:kv_cache_usage_perc") > 0
    cluster.wait_until_idle(cluster.prefill)
    for _ in range(8):  # more than prefill has blocks for
        cluster.tokens(cluster.prefill, random_prompt(rng, 3500), max_tokens=1)
    answer = cluster.ask(cluster.decode, prompt, kv_transfer_params=params)
    assert answer.status_code == 500
    assert "made no offer within" in cluster.decode.tail()
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)


@pytest.mark.parametrize(
    "altered",
    [
        {"remote_block_ids": [[1, 2, 3]]},
        {"remote_request_id": "another", "remote_engine_id": "another"},
        {"remote_host": "203.0.113.1", "remote_port": 1},
    ],
    ids=["blocks", "request", "host"],
)
def test_a_clients_block_ids_request_ids_and_hosts_are_not_used(
    cluster: Cluster, rng: random.Random, altered: dict[str, Any]
) -> None:
    prompt = random_prompt(rng, 300)
    params = cluster.keep(prompt) | altered
    tokens = cluster.tokens(cluster.decode, prompt, kv_transfer_params=params)
    assert tokens == cluster.tokens(cluster.aggregated, prompt)


def test_a_reply_sent_to_another_engine_gives_an_error(
    cluster: Cluster, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 300)
    params = cluster.keep(prompt)
    address = params["prefill_engine_address"].rpartition("/")[0]
    wrong = params | {"prefill_engine_address": address + "/" + 32 * "1"}
    del wrong["prefill_rank_addresses"]
    assert cluster.ask(cluster.decode, prompt, kv_transfer_params=wrong).status_code == 500
    cluster.wait_until_idle(cluster.prefill)  # the lease has to end: no message can reach prefill


def test_the_ticket_of_another_prompt_gives_an_error(cluster: Cluster, rng: random.Random) -> None:
    ours, theirs = random_prompt(rng, 300), random_prompt(rng, 300)
    params = cluster.keep(theirs)
    assert cluster.ask(cluster.decode, ours, kv_transfer_params=params).status_code == 500
    assert "is for another prompt" in cluster.decode.tail()
    # vLLM reports that the request was rejected, with the ticket.
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)


def test_a_reply_can_be_used_once(cluster: Cluster, rng: random.Random) -> None:
    prompt = random_prompt(rng, 300)
    params = cluster.keep(prompt)
    cluster.tokens(cluster.decode, prompt, kv_transfer_params=params)
    assert cluster.ask(cluster.decode, prompt, kv_transfer_params=params).status_code == 500
    assert "was already used" in cluster.decode.tail()


def samples(answer: httpx2.Response) -> list[list[int]]:
    assert answer.is_success, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice["token_ids"] for choice in choices]


@pytest.mark.parametrize("protocol", ["pull", "push"])
@pytest.mark.parametrize("length", [50, 700])
def test_all_samples_of_a_request_are_right(
    cluster: Cluster, rng: random.Random, protocol: str, length: int
) -> None:
    prompt = random_prompt(rng, length)
    # vLLM takes several greedy samples only as sampling with top_k 1.
    asked: dict[str, Any] = {"n": 3, "temperature": 1.0, "top_k": 1}
    expected = [cluster.tokens(cluster.aggregated, prompt)] * 3
    before = fetched(cluster.decode)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        if protocol == "pull":
            params = cluster.keep(prompt, **asked)
        else:
            params = cluster.open_transfer(f"samples-{length}")
            threads.submit(
                cluster.ask,
                cluster.prefill,
                prompt,
                **asked | {"max_tokens": 1},
                kv_transfer_params=params,
            )
        answer = cluster.ask(cluster.decode, prompt, **asked, kv_transfer_params=params)
    assert samples(answer) == expected
    # All but the last token, which decode computes.
    assert fetched(cluster.decode) - before >= length - 1, "decode has computed the prompt itself"
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)


def test_prefill_frees_a_prompt_that_decode_has(cluster: Cluster, rng: random.Random) -> None:
    prompt = random_prompt(rng, 257)  # two whole blocks, and the token that decode computes
    tokens = proxied(cluster, prompt)
    before = fetched(cluster.decode)
    assert proxied(cluster, prompt) == tokens == cluster.tokens(cluster.aggregated, prompt)
    assert fetched(cluster.decode) == before
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)


def test_prefill_frees_a_prompt_that_decode_refuses(cluster: Cluster, rng: random.Random) -> None:
    prompt = random_prompt(rng, 1000)
    params = cluster.keep(prompt)
    answer = cluster.ask(cluster.decode, prompt, max_tokens=9000, kv_transfer_params=params)
    assert answer.status_code == 400
    assert "9000" in answer.text
    cluster.wait_until_idle_within(SOON, cluster.prefill, cluster.decode)
