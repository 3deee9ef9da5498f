"""`kvxfer router` over a real cluster: processes are frozen and killed, and clients leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from kvxfer.event_stream import EventParser
from kvxfer.reference.runner import ModelRunner

from .cluster import Cluster, until
from .completions import asked, streamed, tokens_of

pytestmark = pytest.mark.realtime

LONG = 3000  # tokens: requests stay under way until a test is done with its faults


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Cluster]:
    with Cluster(model) as cluster:
        yield cluster


@pytest.fixture
async def cluster(whole: Cluster) -> AsyncIterator[Cluster]:
    """Two prefill and two decode workers, idle before and after each test."""
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    await asyncio.to_thread(whole.bury)
    await asyncio.to_thread(whole.start_workers, *names)
    await until(lambda: set(names) <= set(whole.instances()) and whole.idle())
    yield whole
    await until(whole.idle)


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=cluster.router.url, timeout=None) as client:
        yield client


@pytest.mark.parametrize("frozen", ["prefill-0", "decode-0"])
async def test_a_client_that_leaves_a_brokered_handshake_is_forgotten_on_both_sides(
    cluster: Cluster, frozen: str
) -> None:
    with cluster.frozen(frozen):
        async with httpx2.AsyncClient(base_url=cluster.brokering.url, timeout=None) as brokered:
            request = asyncio.create_task(brokered.post("/v1/completions", json=asked("x" * 300)))
            await until(cluster.transfers)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not cluster.transfers())
    await until(cluster.idle)


@pytest.mark.parametrize("doomed", ["prefill-0", "decode-0"])
async def test_a_worker_killed_in_a_brokered_handshake_costs_a_retry_and_no_answer(
    cluster: Cluster, single: ModelRunner, doomed: str
) -> None:
    async with httpx2.AsyncClient(base_url=cluster.brokering.url, timeout=None) as brokered:
        with cluster.frozen(doomed):
            request = asyncio.create_task(
                brokered.post("/v1/completions", json=asked("not in vain"))
            )
            await until(cluster.transfers)
            cluster.kill(doomed)
        assert tokens_of(await request) == single.generate("not in vain", 24, ignore_eos=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_forgotten_on_both_sides(
    cluster: Cluster, client: httpx2.AsyncClient, stream: bool
) -> None:
    aborted = cluster.metric("kvxfer_router_aborted_total")
    with cluster.frozen("prefill-0"):
        request = asyncio.create_task(
            client.post("/v1/completions", json=asked("x" * 300, stream=stream))
        )
        await until(cluster.transfers)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not cluster.transfers())
    await until(cluster.idle)
    assert cluster.metric("kvxfer_router_aborted_total") == aborted + 1


def computed(cluster: Cluster) -> float:
    """Requests whose prompt prefill has computed: the router has released their reservation."""
    return cluster.metric("kvxfer_transfers_ended_total", cluster.url)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_after_the_first_token_is_forgotten_on_both_sides(
    cluster: Cluster, client: httpx2.AsyncClient, stream: bool
) -> None:
    body = asked("leave me", LONG)
    if stream:
        async with streamed(client, body) as events:
            assert await anext(events)
            assert not await asyncio.to_thread(cluster.idle)
    else:
        begun = computed(cluster)
        request = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: computed(cluster) > begun)
        assert not await asyncio.to_thread(cluster.idle)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(cluster.idle)


@pytest.mark.parametrize("doomed", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_killed_before_the_first_token_costs_a_retry_and_no_answer(
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner, doomed: str, stream: bool
) -> None:
    retries = cluster.metric("kvxfer_router_retries_total")
    # Frozen, so that the request has reached it when it is killed.
    with cluster.frozen(doomed):
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
    cluster: Cluster, client: httpx2.AsyncClient
) -> None:
    async with streamed(client, asked("cut short", LONG)) as events:
        assert await anext(events)
        cluster.kill("decode-0")
        *_, last = [event async for event in events]
    assert last is not None, "the stream says that it is complete"
    assert last["error"]["code"] == "peer-lost"
    assert last["error"]["type"] == "server_error"


async def test_an_answer_in_one_piece_survives_its_decode_worker(
    cluster: Cluster, client: httpx2.AsyncClient, single: ModelRunner
) -> None:
    begun = computed(cluster)
    request = asyncio.create_task(client.post("/v1/completions", json=asked("again", 600)))
    await until(lambda: computed(cluster) > begun)
    cluster.kill("decode-0")
    answer = (await request).json()
    assert answer["choices"][0]["token_ids"] == single.generate("again", 600, ignore_eos=True)
