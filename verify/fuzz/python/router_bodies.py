"""The bodies of OpenAI's API at the router, and the parameters of a transfer at vLLM's workers."""

from __future__ import annotations

import contextlib
import json

import msgspec

from kvxfer.connectors.vllm.plan import TransferParams
from kvxfer.errors import InvalidArgument
from kvxfer.router.bodies import ChatBody, CompletionBody, read_body
from kvxfer.router.errors import InvalidRequest
from kvxfer.unreadable import UNREADABLE
from verify.fuzz.python.choices import Choices

DECODERS = {
    "kvxfer/router/bodies.py": None,
    "kvxfer/connectors/vllm/plan.py": ["TransferParams.of", "TransferParams.addresses"],
}


def run(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.below(4)
    if kind < 2:
        _body((CompletionBody, ChatBody)[kind], choices.rest())
    elif kind == 2:
        _tokens(choices)
    else:
        _params(choices.rest())


def _body(kind: type[CompletionBody] | type[ChatBody], content: bytes) -> None:
    try:
        body = read_body(kind, content)
    except InvalidRequest:
        return
    request = body.request("request", 4.0, arrived=0.0)
    json.dumps({**request.body}).encode()  # as it goes to the workers
    assert request.prompt_tokens is None or request.prompt_tokens >= 0
    assert isinstance(body.include_usage, bool)


def _tokens(choices: Choices) -> None:
    """A prompt that is long enough to have hashes."""
    token = choices.integer()
    prompt = [token] * choices.byte()
    _body(CompletionBody, json.dumps({"model": choices.text(), "prompt": prompt}).encode())


def _params(content: bytes) -> None:
    try:
        params = msgspec.json.decode(content, type=dict[str, object])
    except UNREADABLE:
        return
    with contextlib.suppress(InvalidArgument):
        read = TransferParams.of(params)
        assert read is None or all(isinstance(address, str) for address in read.addresses)
