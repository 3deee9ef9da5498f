"""`kvxfer router` over a real cluster: every part a process, real KV transfers, kill -9."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from kvxfer.event_stream import EventParser
from kvxfer.reference.runner import ModelRunner

from .cluster import Cluster, until
from .completions import MODEL, asked, streamed, tokens_of

LONG = 3000  # tokens: what is under way stays so until a test has done its worst


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Cluster]:
    with Cluster(model) as cluster:
        yield cluster


@pytest.fixture
async def cluster(whole: Cluster) -> AsyncIterator[Cluster]:
    """Two prefill and two decode workers, idle; idle again in the end."""
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    running = set(whole.running)
    # One that was killed comes back when its lease has ended.
    await until(lambda: set(whole.instances()) <= running)
    await asyncio.to_thread(whole.start_workers, *names)
    await until(lambda: set(names) <= set(whole.instances()) and whole.idle())
    yield whole
    await until(whole.idle)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.router.url, timeout=60) as client:
        yield client


async def test_tokens_are_those_of_a_single_process(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner
) -> None:
    prompt = "The cache moves. " * 20
    expected = single.generate(prompt, 24, ignore_eos=True)
    answer = (await client.post("/v1/completions", json=asked(prompt))).json()
    assert answer["choices"][0]["token_ids"] == expected
    assert answer["choices"][0]["text"] == single.tokenizer.decode(expected)
    assert answer["usage"]["prompt_tokens"] == len(prompt)

    async with streamed(client, asked(prompt)) as events:
        *chunks, done = [event async for event in events]
    assert done is None
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == expected
    assert "".join(choice["text"] for choice in choices) == single.tokenizer.decode(expected)

    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
    answer = (await client.post("/v1/chat/completions", json=chat)).json()
    expected = single.generate("<|user|>\nhi\n<|assistant|>\n", 8)
    assert answer["choices"][0]["message"]["content"] == single.tokenizer.decode(expected)


async def test_32_at_once_get_each_their_own_answer(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner
) -> None:
    prompts = [f"Request {i}: " + "page " * (i + 1) for i in range(32)]

    async def stream(prompt: str) -> list[int]:
        async with streamed(client, asked(prompt)) as events:
            return [t async for e in events if e for t in e["choices"][0]["token_ids"]]

    async def whole(prompt: str) -> list[int]:
        answer = (await client.post("/v1/completions", json=asked(prompt))).json()
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens

    answers = await asyncio.gather(
        *(stream(prompt) if i % 2 else whole(prompt) for i, prompt in enumerate(prompts))
    )
    for prompt, tokens in zip(prompts, answers, strict=True):
        assert tokens == single.generate(prompt, 24, ignore_eos=True)


async def test_the_brokered_handshake_gives_the_same_tokens(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner
) -> None:
    prompts = [f"By way of the control plane, {i}: " + "page " * (8 * i + 1) for i in range(8)]
    tables = 'kvxfer_http_requests_total{method="POST",route="%s/block-table",status="201"}'
    posted = partial(cluster.metric, tables % "/v1/transfers/{transfer_id}", cluster.url)
    before = posted()
    direct = [client.post("/v1/completions", json=asked(prompt)) for prompt in prompts]
    direct_tokens = [tokens_of(answer) for answer in await asyncio.gather(*direct)]
    assert posted() == before
    async with httpx.AsyncClient(base_url=cluster.brokering.url, timeout=60) as brokered:
        calls = [brokered.post("/v1/completions", json=asked(prompt)) for prompt in prompts]
        tokens = [tokens_of(answer) for answer in await asyncio.gather(*calls)]
    assert tokens == direct_tokens
    assert tokens == [single.generate(prompt, 24, ignore_eos=True) for prompt in prompts]
    assert posted() == before + len(prompts)


@pytest.mark.parametrize("frozen", ["prefill-0", "decode-0"])
async def test_a_client_that_leaves_a_brokered_handshake_is_forgotten_on_both_sides(
    cluster: Cluster, frozen: str
) -> None:
    cluster.running[frozen].freeze()
    try:
        async with httpx.AsyncClient(base_url=cluster.brokering.url, timeout=60) as brokered:
            request = asyncio.create_task(brokered.post("/v1/completions", json=asked("x" * 300)))
            await until(cluster.transfers)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not cluster.transfers())
    finally:
        cluster.running[frozen].resume()
    await until(cluster.idle)


@pytest.mark.parametrize("doomed", ["prefill-0", "decode-0"])
async def test_a_worker_killed_in_a_brokered_handshake_costs_a_retry_and_no_answer(
    cluster: Cluster, single: ModelRunner, doomed: str
) -> None:
    cluster.running[doomed].freeze()
    async with httpx.AsyncClient(base_url=cluster.brokering.url, timeout=60) as brokered:
        request = asyncio.create_task(brokered.post("/v1/completions", json=asked("not in vain")))
        await until(cluster.transfers)
        cluster.kill(doomed)
        assert tokens_of(await request) == single.generate("not in vain", 24, ignore_eos=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_forgotten_on_both_sides(
    cluster: Cluster, client: httpx.AsyncClient, stream: bool
) -> None:
    aborted = cluster.metric("kvxfer_router_aborted_total")
    cluster.running["prefill-0"].freeze()
    try:
        request = asyncio.create_task(
            client.post("/v1/completions", json=asked("x" * 300, stream=stream))
        )
        await until(cluster.transfers)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not cluster.transfers())
    finally:
        cluster.running["prefill-0"].resume()
    await until(cluster.idle)
    assert cluster.metric("kvxfer_router_aborted_total") == aborted + 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_the_first_token_is_forgotten_on_both_sides(
    cluster: Cluster, client: httpx.AsyncClient, stream: bool
) -> None:
    body = asked("leave me", LONG)
    if stream:
        async with streamed(client, body) as events:
            assert await anext(events)
            assert not await asyncio.to_thread(cluster.idle)
    else:
        begun = cluster.metric("kvxfer_router_time_to_first_token_seconds_count")
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(
            lambda: cluster.metric("kvxfer_router_time_to_first_token_seconds_count") > begun
        )
        assert not await asyncio.to_thread(cluster.idle)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(cluster.idle)


@pytest.mark.parametrize("doomed", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_killed_before_the_first_token_costs_a_retry_and_no_answer(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner, doomed: str, stream: bool
) -> None:
    retries = cluster.metric("kvxfer_router_retries_total")
    # Frozen, so that the request is there when it dies.
    cluster.running[doomed].freeze()
    request = asyncio.create_task(
        client.post("/v1/completions", json=asked("not in vain", stream=stream))
    )
    await until(cluster.transfers)
    (transfer,) = cluster.transfers()
    assert doomed in (transfer.prefill.instance_id, transfer.decode.instance_id)
    cluster.kill(doomed)
    answer = await request
    assert answer.status_code == 200, answer.text
    events = [event.data for event in EventParser().feed(answer.content)]
    chunks = [json.loads(e) for e in events if e != "[DONE]"] if stream else [answer.json()]
    tokens = [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]]
    assert tokens == single.generate("not in vain", 24, ignore_eos=True)
    assert cluster.metric("kvxfer_router_retries_total") == retries + 1


async def test_a_decode_worker_killed_after_the_first_token_ends_the_stream_with_an_error(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    async with streamed(client, asked("cut short", LONG)) as events:
        assert await anext(events)
        cluster.kill("decode-0")
        *_, last = [event async for event in events]
    assert last is not None, "the stream says that it is complete"
    assert last["error"]["code"] == "peer-lost"
    assert last["error"]["type"] == "server_error"


async def test_an_answer_in_one_piece_survives_its_decode_worker(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner
) -> None:
    begun = cluster.metric("kvxfer_router_time_to_first_token_seconds_count")
    request = asyncio.create_task(client.post("/v1/completions", json=asked("again", 600)))
    await until(lambda: cluster.metric("kvxfer_router_time_to_first_token_seconds_count") > begun)
    cluster.kill("decode-0")
    answer = (await request).json()
    assert answer["choices"][0]["token_ids"] == single.generate("again", 600, ignore_eos=True)


async def test_a_slow_client_gets_every_token(
    cluster: Cluster, client: httpx.AsyncClient, single: ModelRunner
) -> None:
    tokens: list[int] = []
    async with streamed(client, asked("slowly", 60)) as events:
        async for event in events:
            tokens += event["choices"][0]["token_ids"] if event else []
            await asyncio.sleep(0.02)
    assert tokens == single.generate("slowly", 60, ignore_eos=True)
