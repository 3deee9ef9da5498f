"""Two routers over three replicas of the control plane, Redis, and one pair of real workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from kvxfer.reference.runner import ModelRunner
from verify.polling import eventually
from verify.processes.balancer import Balancer
from verify.processes.redis_server import RedisServer, audit

from .cluster import BLOCKS, Cluster, until
from .completions import asked

pytestmark = pytest.mark.realtime

REQUESTS = 8


@pytest.fixture
def cluster(model: Path, empty_redis: RedisServer) -> Iterator[Cluster]:
    """A cluster with the first replica and a router; a test adds others."""
    with Cluster(model, "--registry", empty_redis.url) as cluster:
        cluster.start_workers("prefill-0", "decode-0")
        yield cluster


async def test_two_routers_never_overbook_the_only_pair_and_both_answer(
    cluster: Cluster, empty_redis: RedisServer, single: ModelRunner
) -> None:
    serve = ("serve", "--port", "0", "--registry", empty_redis.url, "--lease-seconds", "60")
    replicas = [cluster.url, *(cluster.start(f"replica-{n}", *serve).url for n in (1, 2))]
    # The reservation for a prompt is so large that two fit and a third does not.
    options = ("router", "--port", "0", "--capacity-seconds", "100", "--first-token-seconds", "200")
    prompts = ["".join(chr(97 + (n + k) % 26) for k in range(3000)) for n in range(REQUESTS)]
    each = 3000 // 16 + 1
    assert 2 * each <= BLOCKS < 3 * each

    with Balancer(urlsplit(url).port or 0 for url in replicas) as balancer:
        routers = [
            await asyncio.to_thread(
                cluster.start, f"router-{n}", *options, "--control-plane", balancer.url
            )
            for n in (1, 2)
        ]
        async with httpx2.AsyncClient(timeout=None) as client:

            async def ask(number: int) -> list[int]:
                url = f"{routers[number % 2].url}/v1/completions"
                answer = await client.post(url, json=asked(prompts[number], 1))
                assert answer.status_code == 200, answer.text
                tokens: list[int] = answer.json()["choices"][0]["token_ids"]
                return tokens

            async def reserved() -> set[int]:
                """Returns the numbers of transfers of an instance, as each replica reports them."""
                found: set[int] = set()
                for url in replicas:
                    for instance in (await client.get(f"{url}/v1/instances")).json()["instances"]:
                        held = instance["reserved"]
                        assert held["blocks"] == each * held["transfers"] <= BLOCKS
                        found.add(held["transfers"])
                return found

            async def both_are_full() -> bool:
                return await reserved() == {2}

            def waiting() -> float:
                return sum(cluster.metric("kvxfer_router_waiting", one.url) for one in routers)

            # The first prompts teach both routers the length of a text, as the worker will not
            # answer.
            for number, router in enumerate(routers):
                asked_worker = 'kvxfer_router_tokenized_total{outcome="asked"}'
                while not await asyncio.to_thread(cluster.metric, asked_worker, router.url):
                    await ask(number)
            await until(cluster.idle)
            with cluster.frozen("prefill-0"):
                answers = asyncio.gather(*(ask(number) for number in range(REQUESTS)))
                # By then all have asked for a pair, and continue to ask.
                await until(lambda: waiting() == REQUESTS - 2)
                await eventually(both_are_full)
            while not answers.done():
                assert max(await reserved()) <= 2
            for prompt, tokens in zip(prompts, await answers, strict=True):
                assert tokens == single.generate(prompt, 1, ignore_eos=True)
        await until(cluster.idle)
    assert audit(empty_redis) == {}
