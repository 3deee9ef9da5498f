"""The bodies of inference engines' APIs that the router reads, and the parameters of a transfer
that vLLM's workers read."""

from __future__ import annotations

import contextlib
import json

import msgspec

from kvxfer.connectors.vllm.plan import TransferParams
from kvxfer.errors import InvalidArgument, ProtocolError
from kvxfer.router.asked import read_request
from kvxfer.router.dialects import COMPLETIONS, GENERATING
from kvxfer.router.errors import told_by
from kvxfer.router.event_bytes import EventBytes, data_of, events_in, with_data
from kvxfer.router.worker_errors import error_event, error_of
from kvxfer.unreadable import UNREADABLE
from verify.fuzz.python.choices import Choices

DECODERS = {
    "kvxfer/router/asked.py": None,
    "kvxfer/router/bodies.py": None,
    "kvxfer/router/dialects.py": None,
    "kvxfer/router/event_bytes.py": None,
    "kvxfer/router/worker_errors.py": None,
    "kvxfer/connectors/vllm/plan.py": ["TransferParams.of", "TransferParams.addresses"],
}


def run(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.below(len(GENERATING) + 4)
    if kind < len(GENERATING):
        _body(kind, choices.rest())
    elif kind == len(GENERATING):
        _tokens(choices)
    elif kind == len(GENERATING) + 1:
        _params(choices.rest())
    elif kind == len(GENERATING) + 2:
        _answer(choices)
    else:
        _stream(choices)


def _body(dialect: int, content: bytes) -> None:
    try:
        asked = read_request(GENERATING[dialect], content, request_id="r", named=False)
    except InvalidArgument:
        return
    sent = msgspec.json.encode({**asked.members, "kv_transfer_params": {}})
    with contextlib.suppress(UnicodeDecodeError, RecursionError):
        assert isinstance(json.loads(sent), dict)  # as workers read it
    assert asked.prompt_tokens is None or asked.prompt_tokens > 0
    assert asked.alone or asked.members or content.strip() == b"{}"
    asked.dialect.renders(asked.members)
    asked.dialect.prompt_logprobs(asked.members)


def _tokens(choices: Choices) -> None:
    """Reads a prompt that may be long enough to have hashes."""
    token = choices.integer()
    prompt = [token] * choices.byte()
    content = json.dumps({"model": choices.text(), "prompt": prompt}).encode()
    _body(GENERATING.index(COMPLETIONS), content)


def _answer(choices: Choices) -> None:
    """Reads a worker's answer, as an error and as one into which prefill's answer is merged."""
    dialect = GENERATING[choices.below(len(GENERATING))]
    content = choices.rest()
    error_of("http://worker", 500, content, {})
    told_by(content)
    with contextlib.suppress(*UNREADABLE):
        answer = msgspec.json.decode(content, type=dict[str, object])
        error_event("http://worker", answer, content)
        dialect.with_prompt(answer, msgspec.json.decode(content))


def _stream(choices: Choices) -> None:
    """Checks that a stream has the same events, however it is cut."""
    size, content = choices.byte() + 1, choices.rest()
    try:
        whole = EventBytes().feed(content)
        events = EventBytes()
        parts = [events.feed(content[at : at + size]) for at in range(0, len(content), size)]
    except ProtocolError:
        return
    assert content.startswith(b"".join(parts))
    assert content.startswith(whole)
    for event in events_in(whole):
        if data_of(event) is not None:
            assert data_of(with_data(event, 1)) == b"1"


def _params(content: bytes) -> None:
    try:
        params = msgspec.json.decode(content, type=dict[str, object])
    except UNREADABLE:
        return
    with contextlib.suppress(InvalidArgument):
        read = TransferParams.of(params)
        assert read is None or all(isinstance(address, str) for address in read.addresses)
