"""The output that the router expects of a request, learned from earlier answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvxfer.router.asked import Asked, read_request
from kvxfer.router.dialects import CHAT, COMPLETIONS, Dialect
from kvxfer.router.output_lengths import OutputLengths, tokens_told
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Network, Reply

from .servers import DECODES, USAGE
from .test_passing import JSON, Workers, workers

__all__ = ["workers"]


def asked(dialect: Dialect = CHAT, model: str = "llama", **members: object) -> Asked:
    body = {"model": model, "messages": [], "prompt": "p", **members}
    return read_request(dialect, json.dumps(body).encode(), request_id="r")


def test_nothing_is_expected_before_the_first_answer():
    assert OutputLengths().expected(asked(max_tokens=16)) is None


def test_the_mean_of_its_model_is_expected_and_no_more_than_the_request_allows():
    lengths = OutputLengths()
    for tokens in (100, 200, 300):
        lengths.ended("llama", tokens)
    lengths.ended("qwen", 7)
    assert lengths.expected(asked()) == 200
    assert lengths.expected(asked(max_tokens=50)) == 50
    assert lengths.expected(asked(max_completion_tokens=150, max_tokens=50)) == 150
    assert lengths.expected(asked(COMPLETIONS)) == 16, "vLLM's default"
    assert lengths.expected(asked(model="qwen")) == 7
    assert lengths.expected(asked(model="other")) is None


def test_old_answers_are_forgotten_and_empty_ones_do_not_count():
    lengths = OutputLengths()
    for _ in range(100):
        lengths.ended("llama", 1000)
    for _ in range(1000):
        lengths.ended("llama", 10)
        lengths.ended("llama", 0)
    assert lengths.expected(asked()) == 10


def test_wrong_lengths_of_a_worker_stay_within_what_a_request_may_ask_for():
    lengths = OutputLengths()
    lengths.ended("llama", 10**30)
    assert lengths.expected(asked()) == 2**31 - 1


@pytest.mark.parametrize(
    ("content", "tokens"),
    [
        (b'{"usage": {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}}', 12),
        (b'{"usage":{"input_tokens":9,"output_tokens":12}}', 12),
        (b'{"usage":{"completion_tokens":1}}\n\ndata: {"usage":{"completion_tokens":2}}', 2),
        (b"data: [DONE]\n\n", 0),
    ],
)
def test_the_length_of_an_answer_comes_from_its_usage(content, tokens):
    assert tokens_told(content) == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_blocks_are_reserved_for_the_output_that_answers_of_the_model_had(
    network: Network, workers: Workers, control_plane: EmbeddedRegistry, stream: bool
) -> None:
    reserved = []

    async def decodes(body: dict[str, Any], reply: Reply) -> None:
        reserved.extend(t.decode_blocks for t in await control_plane.transfers())
        if stream:
            await DECODES(body, reply)
        else:
            await reply.begin(200, JSON)
            await reply.write(json.dumps({"choices": [], "usage": USAGE}).encode())

    workers.decodes = decodes
    # 15 tokens, and 2 by USAGE or by the events of the stream, are more than a block.
    body = {"model": "llama", "prompt": list(range(15)), "max_tokens": 9, "stream": stream}
    async with network.routed() as client:
        for _ in range(2):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert reserved == [1, 2]
