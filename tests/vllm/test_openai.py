"""OpenAI's API of `kvxfer router` over the real vLLM: answers are those of an aggregated server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from kvxfer.event_stream import EventParser
from verify.processes.programs import Server

from .conftest import Cluster

pytestmark = [pytest.mark.native, pytest.mark.timeout(600)]

WORDS = " ".join(f"w{3 + 7 * i % 500}" for i in range(300))
MESSAGES = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": WORDS}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Nearly greedy: vLLM has no two greedy samples.
TWO = {"n": 2, "temperature": 0.01, "seed": 7}


def post(server: Server, path: str, body: dict[str, Any]) -> httpx2.Response:
    asked = {"model": "tiny", "temperature": 0, "ignore_eos": True, **body}
    answer = httpx2.post(server.url + path, json=asked, timeout=90.0)
    assert answer.is_success, answer.text
    return answer


def assert_alike(ours: Any, theirs: Any, where: str = "answer") -> None:
    """All that an aggregated server tells, logprobs as far as floats go."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), where
        for name, value in theirs.items():
            if value is not None:
                assert_alike(ours[name], value, f"{where}.{name}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_alike(one, other, f"{where}[{index}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-3), where
    else:
        assert ours == theirs, where


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": WORDS, "max_tokens": 12}),
        (COMPLETIONS, {"prompt": WORDS + " w9", "max_tokens": 6, "logprobs": 2}),
        (COMPLETIONS, {"prompt": WORDS + " w10", "max_tokens": 6, "min_tokens": 4, **TWO}),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 12}),
        (CHAT, {"messages": MESSAGES[1:], "max_tokens": 6, "logprobs": True, "top_logprobs": 2}),
    ],
)
def test_an_answer_in_one_piece_is_whole(cluster: Cluster, path: str, body: dict[str, Any]) -> None:
    ours, theirs = (
        post(server, path, body).json() for server in (cluster.router, cluster.aggregated)
    )
    assert_alike(ours["choices"], theirs["choices"], "choices")
    assert ours["object"] == theirs["object"]
    assert_alike(ours["usage"], theirs["usage"], "usage")


def said(answer: httpx2.Response) -> Iterator[str]:
    *events, done = [event.data for event in EventParser().feed(answer.content)]
    assert done == "[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            yield choice["delta"].get("content") or ""


def test_a_chat_is_streamed(cluster: Cluster) -> None:
    body = {"messages": [*MESSAGES, MESSAGES[0]], "max_tokens": 12, "stream": True}
    ours, theirs = (
        "".join(said(post(server, CHAT, body))) for server in (cluster.router, cluster.aggregated)
    )
    assert ours == theirs
    assert ours


def test_the_cache_of_a_chat_has_moved(cluster: Cluster) -> None:
    name = "vllm:external_prefix_cache_hits_total"
    before = cluster.decode.metric(name)
    messages = [{"role": "user", "content": "w400 " * 200}]
    post(cluster.router, CHAT, {"messages": messages, "max_tokens": 2})
    assert cluster.decode.metric(name) >= before + 199


def test_what_vllm_refuses_is_a_400(cluster: Cluster) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 1_000_000}
    answer = httpx2.post(cluster.router.url + CHAT, json=body, timeout=90.0)
    assert answer.status_code == 400
    assert "max_tokens" in answer.json()["error"]["message"]
    cluster.wait_until_idle(cluster.prefill, cluster.decode)
