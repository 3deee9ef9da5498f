"""Requests that a pair with few KV blocks preempts, delays or cannot take, and clients that leave
at any moment."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from verify.polling import wait_until
from verify.processes.programs import Server

from .conftest import Cluster, cluster_of
from .test_pull import fetched, proxied, random_prompt

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

LEASE_SECONDS: Final = 8.0
# Long before a lease ends.
SOON: Final = 5.0
# Eleven blocks of 128 tokens are left for requests.
FEW: Final = ("--num-gpu-blocks-override", "12")
# Two prompts are computed side by side, in many steps.
CHUNKS: Final = ("--max-num-batched-tokens", "32", "--long-prefill-token-threshold", "16")
EVENTS: Final = (
    "--kv-events-config",
    json.dumps({"enable_kv_cache_events": True, "publisher": "null"}),
)


@pytest.fixture(scope="module")
def tight(folder: Path, model: Path, aggregated: Server) -> Iterator[Cluster]:
    with cluster_of(
        folder / "tight",
        model,
        aggregated,
        prefill=("--max-model-len", "1280", *FEW, *CHUNKS, *EVENTS),
        decode=("--max-model-len", "1024", *FEW),
        lease_seconds=LEASE_SECONDS,
    ) as started:
        yield started


def waiting(server: Server) -> float:
    return server.metric("vllm:num_requests_waiting")


def preemptions(server: Server) -> float:
    return server.metric("vllm:num_preemptions_total")


def whole(tight: Cluster, asked: Sequence[list[int]], **more: Any) -> list[list[int]]:
    return [tight.tokens(tight.aggregated, prompt, **more) for prompt in asked]


@contextlib.contextmanager
def side_by_side(tight: Cluster, rng: random.Random) -> Iterator[list[list[int]]]:
    """Two prompts that do not fit together. Their requests, sent inside, wait for blocks until both
    are queued, so that prefill begins them in the same step and has to preempt one."""
    kept = random_prompt(rng, 1100)
    params = tight.keep(kept)
    before = preemptions(tight.prefill)
    yield [random_prompt(rng, length) for length in (900, 850)]
    wait_until(lambda: waiting(tight.prefill) == 2)
    # Decode refuses the long prompt, and prefill frees it.
    assert tight.ask(tight.decode, kept, kv_transfer_params=params).status_code == 400
    wait_until(lambda: preemptions(tight.prefill) > before)


def test_evicted_prefixes_are_no_longer_reported(tight: Cluster, rng: random.Random) -> None:
    assert tight.fleet.instances()["prefill"].labels["prefixes"] == "kv-events"
    first, second = random_prompt(rng, 700), random_prompt(rng, 900)
    tight.tokens(tight.router, first)
    wait_until(lambda: tight.cached_tokens(first) == 5 * 128, pause=0.1)
    # Eleven blocks hold eight of the second prompt, and no more than three of the first.
    tight.tokens(tight.router, second)
    wait_until(lambda: tight.cached_tokens(second) == 7 * 128, pause=0.1)
    assert tight.cached_tokens(first) <= 3 * 128


def test_a_prompt_that_prefill_preempts_is_kept_when_it_is_computed_again(
    tight: Cluster, rng: random.Random
) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with side_by_side(tight, rng) as asked:
            apart = [threads.submit(proxied, tight, prompt) for prompt in asked]
        got = [one.result() for one in apart]
    assert got == whole(tight, asked)
    tight.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_a_push_that_prefill_preempts_ends_with_an_error(
    tight: Cluster, rng: random.Random
) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        pushed = []
        with side_by_side(tight, rng) as asked:
            for prompt in asked:
                # The router would not send the second one until there are blocks for it.
                params = tight.ticket("prefill", "decode")
                for server, more in ((tight.prefill, {"max_tokens": 1}), (tight.decode, {})):
                    more |= {"kv_transfer_params": params}
                    pushed.append(threads.submit(tight.ask, server, prompt, **more))
        answers = [one.result() for one in pushed]
    assert all(answer.is_success for answer in answers[::2]), "prefill has computed them again"
    assert any(not answer.is_success for answer in answers[1::2])
    for answer, expected in zip(answers[1::2], whole(tight, asked), strict=True):
        if answer.is_success:
            [choice] = answer.json()["choices"]
            assert choice["token_ids"] == expected
    assert "prefill has preempted the request" in tight.decode.tail()
    tight.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_a_request_that_decode_preempts_is_computed_there_again(
    tight: Cluster, rng: random.Random
) -> None:
    asked = [random_prompt(rng, 600) for _ in range(2)]
    kept = [tight.keep(prompt) for prompt in asked]
    before = preemptions(tight.decode), fetched(tight.decode)

    def fetch(index: int) -> list[int]:
        params = kept[index]
        return tight.tokens(tight.decode, asked[index], max_tokens=400, kv_transfer_params=params)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        apart = list(threads.map(fetch, range(2)))
    assert preemptions(tight.decode) > before[0]
    assert fetched(tight.decode) - before[1] == 2 * 599, "both came from prefill, once"
    assert apart == whole(tight, asked, max_tokens=400)
    tight.wait_until_idle_within(SOON, tight.prefill, tight.decode)


@contextlib.contextmanager
def full(tight: Cluster, rng: random.Random, leases: int = 1) -> Iterator[None]:
    """Leaves decode too few blocks for a prompt of 900 tokens, for the given number of leases: it
    offers them to prefill, which never gets the requests."""
    with concurrent.futures.ThreadPoolExecutor(leases) as threads:
        holders = []
        for index in range(leases):
            params = tight.ticket("prefill", "decode")
            prompt = random_prompt(rng, 900)
            ask = functools.partial(tight.ask, tight.decode, prompt, kv_transfer_params=params)
            holders.append(threads.submit(ask))
            wait_until(lambda: waiting(tight.decode) > index)  # noqa: B023
        yield
        assert {holder.result().status_code for holder in holders} == {500}


def test_prefill_frees_a_request_that_is_aborted_in_the_queue_of_decode(
    tight: Cluster, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 900)
    params = tight.keep(prompt)
    with full(tight, rng):
        before = fetched(tight.decode)
        with pytest.raises(httpx2.TimeoutException):
            tight.ask(tight.decode, prompt, kv_transfer_params=params, seconds=2.0)
        tight.wait_until_idle_within(SOON, tight.prefill)
    tight.wait_until_idle_within(SOON, tight.decode)
    assert fetched(tight.decode) == before


@pytest.mark.realtime
def test_prefill_keeps_a_prompt_while_it_waits_in_the_queue_of_decode(
    tight: Cluster, rng: random.Random
) -> None:
    """The prompts wait for longer than their lease, by push and by pull."""
    asked = [random_prompt(rng, 500) for _ in range(2)]
    before = fetched(tight.decode)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        with full(tight, rng, 2):
            begun = time.monotonic()
            apart = [
                threads.submit(proxied, tight, asked[0]),
                threads.submit(tight.tokens, tight.router, asked[1]),
            ]
        got = [one.result() for one in apart]
    assert time.monotonic() - begun > LEASE_SECONDS + 2
    # The prompts that took the blocks count, too. Decode computes the last token of each.
    assert fetched(tight.decode) - before == 2 * 499 + 2 * 899
    assert got == whole(tight, asked)
    tight.wait_until_idle_within(SOON, tight.prefill, tight.decode)


def test_a_prompt_that_is_too_long_for_decode_is_an_error_and_prefill_frees_it(
    tight: Cluster, rng: random.Random
) -> None:
    prompt = random_prompt(rng, 1200)
    params = tight.keep(prompt)
    answer = tight.ask(tight.decode, prompt, kv_transfer_params=params)
    assert answer.status_code == 400
    assert "maximum context length is 1024 tokens" in answer.text
    tight.wait_until_idle_within(SOON, tight.prefill)


def test_a_push_that_is_too_long_for_decode_is_an_error_and_prefill_frees_it(
    tight: Cluster, rng: random.Random
) -> None:
    for length in (1025, 1200, 1270):
        answer = tight.ask(tight.router, random_prompt(rng, length))
        assert answer.status_code == 400
        assert "maximum context length is 1024 tokens" in answer.text
    tight.wait_until_idle_within(SOON, tight.prefill, tight.decode)


@dataclass(frozen=True)
class Client:
    """One request, by push or pull, and the seconds its client waits for each answer."""

    prompt: list[int]
    max_tokens: int
    pulls: bool
    seconds: float

    @classmethod
    def random(cls, rng: random.Random) -> Client:
        leaves = rng.random() < 0.33
        return cls(
            random_prompt(rng, rng.randint(1, 700)),
            rng.randint(1, 150),
            rng.random() < 0.5,
            rng.uniform(0.005, 1.0) if leaves else 90.0,
        )

    def run(self, tight: Cluster) -> httpx2.Response | None:
        """Returns the answer, or None if the client has left."""
        more: dict[str, Any] = {"seconds": self.seconds}
        try:
            server = tight.router
            if self.pulls:
                server = tight.decode
                more["kv_transfer_params"] = tight.keep(self.prompt, **more)
            return tight.ask(server, self.prompt, max_tokens=self.max_tokens, **more)
        except httpx2.TimeoutException:
            return None


def test_every_answer_is_right_and_no_block_stays_in_use(
    tight: Cluster, rng: random.Random
) -> None:
    """There are more requests than blocks, by push and pull; a third of the clients leave."""
    before = [preemptions(server) for server in (tight.prefill, tight.decode)]
    clients = [Client.random(rng) for _ in range(60)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda client: client.run(tight), clients))
    # A prompt whose ticket went to a client that had left is kept until its lease ends.
    tight.wait_until_idle_within(LEASE_SECONDS + SOON, tight.prefill, tight.decode)
    right = 0
    for client, answer in zip(clients, answers, strict=True):
        if answer is not None and answer.is_success:
            [choice] = answer.json()["choices"]
            expected = tight.tokens(tight.aggregated, client.prompt, max_tokens=client.max_tokens)
            assert choice["token_ids"] == expected, client
            right += 1
        elif answer is not None:
            assert answer.json()["error"], client
    after = [preemptions(server) for server in (tight.prefill, tight.decode)]
    assert all(now > then for now, then in zip(after, before, strict=True)), (before, after)
    stayed = sum(client.seconds > 1 for client in clients)
    print(f"{right} right of {stayed} that stayed, preemptions {before} to {after}")
    assert right > stayed / 2
