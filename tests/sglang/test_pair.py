"""Tests that clients of a disaggregated SGLang get the tokens of an aggregated one, or a named
error."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import random

import httpx2
import pytest

from kvxfer.instances import Role
from verify.polling import wait_until
from verify.processes.programs import free_port

from .asking import assert_same, prompts
from .conftest import Pair, wait_for

# Servers of SGLang start in a minute or two; nothing here measures time.
pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]


def test_tokens_are_those_of_an_aggregated_server(pair: Pair, rng: random.Random) -> None:
    assert_same(pair, prompts(rng, 30))


def test_a_room_never_gives_the_cache_of_another_prompt(pair: Pair, rng: random.Random) -> None:
    ours, theirs = prompts(rng, 5)[3:]
    for answer in pair.ask(ours, room=4711, to_decode=theirs):
        assert answer.status_code == 500
        assert "output_ids" not in answer.text
    assert "room 4711 is that of another prompt or LoRA on prefill" in pair.servers["decode"].tail()
    assert_same(pair, [ours, theirs])


def test_a_decode_with_another_rope_gets_no_cache(pair: Pair, rng: random.Random) -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    other = dataclasses.replace(
        pair.decode,
        name="other-rope",
        port=free_port(),
        arguments=(*pair.decode.arguments, "--json-model-override-args", json.dumps(rope)),
    )
    with other.start() as server:
        server.serves("/health")
        for answer in dataclasses.replace(pair, decode=other).ask(prompts(rng, 5)[4]):
            assert answer.status_code == 500
            assert "output_ids" not in answer.text
        assert "rope" in server.tail()
        assert "5000" in server.tail()


def test_the_router_of_kvxfer_asks_both_and_the_fleet_has_their_load(
    pair: Pair, rng: random.Random
) -> None:
    fleet = pair.fleet
    wait_until(lambda: [one.state for one in fleet.client.instances()] == ["ready"] * 2)
    router, whole = fleet.router.url, pair.aggregated.url

    def text(url: str, prompt: list[int], tokens: int = 8) -> str:
        body = {"model": str(pair.prefill.model), "prompt": prompt, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = httpx2.post(url + "/v1/completions", json=body, timeout=90.0)
        assert answer.is_success, answer.text
        return str(answer.json()["choices"][0]["text"])

    for prompt in prompts(rng, 10):
        assert text(router, prompt) == text(whole, prompt)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(text, router, prompt, 500) for prompt in prompts(rng, 4)]
        decode = next(one for one in fleet.client.instances() if one.role is Role.DECODE)
        wait_until(lambda: fleet.client.instance(decode.instance_id).load.running)
        assert fleet.client.instance(decode.instance_id).load.free_blocks
        for one in asked:
            one.result()


def test_a_killed_prefill_is_named_and_its_successor_found(pair: Pair, rng: random.Random) -> None:
    long = [rng.randrange(2, 500) for _ in range(7500)]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pair.ask, long)
        wait_for(pair.servers["prefill"], "Prefill batch, #new-seq: 1, #new-token: 512,")
        pair.servers["prefill"].kill()
        with pytest.raises(httpx2.TransportError):
            asked.result()
    wait_for(pair.servers["decode"], "the peer closed its")
    with pair.prefill.start() as successor:
        successor.serves("/health")
        assert_same(pair, prompts(rng, 5))
