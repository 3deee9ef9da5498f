"""The bodies of inference engines' APIs that the router reads, and the parameters of a transfer
that vLLM's workers read."""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import msgspec

from kvxfer.connectors.vllm.plan import TransferParams
from kvxfer.errors import InvalidArgument, NotAggregating, ProtocolError
from kvxfer.router import event_bytes
from kvxfer.router.asked import read_request
from kvxfer.router.dialects import COMPLETIONS, GENERATING, SINGLE, Dialect
from kvxfer.router.errors import error_object, told_by
from kvxfer.router.event_bytes import EventBytes, data_of, events_in, with_data
from kvxfer.router.worker_errors import error_event, error_of, is_refusal
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
    kind = choices.below(len(GENERATING) + 5)
    if kind < len(GENERATING):
        _body(GENERATING[kind], choices.rest())
    elif kind == len(GENERATING):
        _tokens(choices)
    elif kind == len(GENERATING) + 1:
        _params(choices.rest())
    elif kind == len(GENERATING) + 2:
        _answer(choices)
    elif kind == len(GENERATING) + 3:
        # The limit is small enough for a fuzzer to reach it.
        with mock.patch.object(event_bytes, "MAX_EVENT_BYTES", 512):
            _stream(choices)
    else:
        _body(SINGLE["POST"][0], choices.rest())


def _body(dialect: Dialect, content: bytes) -> None:
    try:
        asked = read_request(dialect, content, request_id="r", named=False)
    except InvalidArgument:
        return
    sent = msgspec.json.encode({**asked.members, "kv_transfer_params": {}})
    with contextlib.suppress(UnicodeDecodeError, RecursionError):
        assert isinstance(json.loads(sent), dict)  # as workers read it
    assert asked.prompt_tokens is None or asked.prompt_tokens > 0
    assert asked.alone or asked.members or content.strip() == b"{}"
    assert -1000 <= asked.priority <= 1000
    refused = error_object(asked.not_by_a_pair(NotAggregating("no instance serves it alone")))
    assert refused["param"] == asked.alone
    assert asked.dialect.is_text(asked.members) or not asked.dialect.renders(asked.members)
    asked.dialect.prompt_logprobs(asked.members)


def _tokens(choices: Choices) -> None:
    """Reads a prompt that may be long enough to have hashes."""
    token = choices.integer()
    prompt = [token] * choices.byte()
    content = json.dumps({"model": choices.text(), "prompt": prompt}).encode()
    _body(COMPLETIONS, content)


def _answer(choices: Choices) -> None:
    """Reads a worker's answer: as an error that ends a stream, as prefill's, and as decode's, into
    which prefill's is merged."""
    dialect = GENERATING[choices.below(len(GENERATING))]
    content = choices.rest()
    told_by(content)
    dialect.ended(content)
    for status in (401, 500):
        error = error_of("http://worker", status, content, {})
        [event] = events_in(dialect.error_event(error_object(error)))
        assert isinstance(json.loads(data_of(event) or b""), dict)
    with contextlib.suppress(*UNREADABLE):
        answer = msgspec.json.decode(content, type=dict[str, object])
        is_refusal(error_event("http://worker", answer, content))
        dialect.lacks_logprobs(answer)
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
