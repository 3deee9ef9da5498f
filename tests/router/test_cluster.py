"""`kvxfer router` over a real cluster: every part a process, real KV transfers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest

from kvxfer.reference.runner import ModelRunner

from .cluster import Cluster, until
from .completions import MODEL, asked, streamed, tokens_of

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Cluster]:
    with Cluster(model) as cluster:
        cluster.start_workers("prefill-0", "prefill-1", "decode-0", "decode-1")
        yield cluster


@pytest.fixture
async def cluster(whole: Cluster) -> AsyncIterator[Cluster]:
    """Two prefill and two decode workers, idle before and after each test."""
    await until(whole.idle)
    yield whole
    await until(whole.idle)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=cluster.router.url, timeout=None) as client:
        yield client


async def test_tokens_are_those_of_a_single_process(
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner
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
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner
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
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner
) -> None:
    prompts = [f"By way of the control plane, {i}: " + "page " * (8 * i + 1) for i in range(8)]
    tables = 'kvxfer_http_requests_total{method="POST",route="%s/block-table",status="201"}'
    posted = partial(cluster.metric, tables % "/v1/transfers/{transfer_id}", cluster.url)
    before = posted()
    direct = [client.post("/v1/completions", json=asked(prompt)) for prompt in prompts]
    direct_tokens = [tokens_of(answer) for answer in await asyncio.gather(*direct)]
    assert posted() == before
    async with httpx2.AsyncClient(base_url=cluster.brokering.url, timeout=None) as brokered:
        calls = [brokered.post("/v1/completions", json=asked(prompt)) for prompt in prompts]
        tokens = [tokens_of(answer) for answer in await asyncio.gather(*calls)]
    assert tokens == direct_tokens
    assert tokens == [single.generate(prompt, 24, ignore_eos=True) for prompt in prompts]
    assert posted() == before + len(prompts)


async def test_a_client_that_reads_when_decode_is_done_gets_every_token(
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner
) -> None:
    tokens: list[int] = []
    async with streamed(client, asked("slowly", 60)) as events:
        await until(cluster.idle)
        async for event in events:
            tokens += event["choices"][0]["token_ids"] if event else []
    assert tokens == single.generate("slowly", 60, ignore_eos=True)
