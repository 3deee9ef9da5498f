"""One worker serves a request if no pair of ready workers can."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.instances import Role
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Network, Reply

from .servers import DECODES, PREFILLS
from .test_passing import ASKED, COMPLETIONS, JSON, Workers, ask, workers

__all__ = ["workers"]


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("gone", "left"), [("p", "d"), ("d", "p")])
async def test_without_a_pair_one_worker_serves_the_request(
    network: Network, workers: Workers, path: str, stream: bool, gone: str, left: str
) -> None:
    async with network.client() as operator:
        await operator.drain(gone)
    async with network.routed() as client:
        answer = await client.post(path, json={**ASKED[path], "stream": stream})
        metrics = (await client.get("/metrics")).text
    assert answer.status_code == 200, answer.text
    assert answer.headers["kvxfer-unpaired"] == "no pair"
    assert workers.names == left
    assert workers.body(left) == {**ASKED[path], "stream": stream}, "as to an aggregated server"
    assert 'kvxfer_router_unpaired_total{reason="no-pair"} 1.0' in metrics


async def test_a_pair_that_becomes_ready_while_one_worker_is_tried_is_used(
    network: Network, workers: Workers
) -> None:
    """The answer's header is that of the attempt that gave the answer."""
    async with network.client() as operator:
        await operator.drain("p")

    async def fails(body: dict[str, Any], reply: Reply) -> None:
        workers.decodes = DECODES
        await network.join("p2", Role.PREFILL, PREFILLS)
        await reply.begin(500, JSON)
        await reply.write(b'{"error": {"message": "it fell over"}}')

    workers.decodes = fails
    answer = await ask(network, COMPLETIONS)
    assert answer.status_code == 200
    assert "kvxfer-unpaired" not in answer.headers


async def test_an_operator_may_forbid_that_one_worker_serves(
    network: Network, workers: Workers
) -> None:
    async with network.client() as operator:
        await operator.drain("p")
    async with network.routed(pairs_only=True, capacity_seconds=1) as client:
        answer = await client.post(COMPLETIONS, json=ASKED[COMPLETIONS])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no-capacity")
    assert "no prefill instance of model 'llama' is ready (1 draining)" in answer.text
    assert not workers.asked


async def test_decode_serves_a_short_prompt_alone_and_says_so(
    network: Network, workers: Workers, control_plane: EmbeddedRegistry
) -> None:
    control_plane._fleet._index._scorer.alone_tokens = 3
    async with network.routed() as client:
        for prompt, served in (([1, 2, 3], "d"), ([1, 2, 3, 4], "dp")):
            workers.asked.clear()
            answer = await client.post(COMPLETIONS, json={"model": "llama", "prompt": prompt})
            assert answer.status_code == 200, answer.text
            assert "".join(sorted({name for name, *_ in workers.asked})) == served
            assert answer.headers.get("kvxfer-unpaired") == (
                "short prompt" if served == "d" else None
            )
        metrics = (await client.get("/metrics")).text
    assert 'kvxfer_router_unpaired_total{reason="short-prompt"} 1.0' in metrics
