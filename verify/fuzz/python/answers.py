"""Answers of a control plane: event streams, values and problem documents."""

from __future__ import annotations

import contextlib
from unittest import mock

import httpx2

from kvxfer import event_stream
from kvxfer.client import answers, calls
from kvxfer.client.watch import WatchReader
from kvxfer.errors import KvxferError
from kvxfer.event_stream import EventParser
from verify.fuzz.python.choices import Choices

DECODERS = {
    "kvxfer/event_stream.py": None,
    "kvxfer/client/watch.py": ["WatchReader.feed", "WatchReader._item"],
    "kvxfer/client/answers.py": [
        "read",
        "problem",
        "_problem",
        "_stale_seconds",
        "_retry_after",
        "unreadable",
    ],
}

_CALLS = (calls.block_table("t"), calls.instances(), calls.instance("i"), calls.transfer("t"))


def run(data: bytes) -> None:
    choices = Choices(data)
    # The limit is small enough for a fuzzer to reach it.
    with mock.patch.object(event_stream, "MAX_EVENT_BYTES", 512):
        (_events, _watch, _answer)[choices.below(3)](choices)


def _events(choices: Choices) -> None:
    whole, pieces = EventParser(), EventParser()
    size = choices.byte() + 1
    stream = choices.rest()
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    with contextlib.suppress(KvxferError):
        expected = whole.feed(stream)
        assert [event for part in parts for event in pieces.feed(part)] == expected


def _watch(choices: Choices) -> None:
    reader = WatchReader("http://control-plane", choices.byte() if choices.flag() else None)
    with contextlib.suppress(KvxferError):
        while choices:
            list(reader.feed(choices.bytes()))
            reader.connect()


def _headers(choices: Choices) -> list[tuple[bytes, bytes]]:
    names = (b"Retry-After", answers.STALE_HEADER.encode(), b"X-Request-ID")
    return [(name, choices.bytes()) for name in names if choices.flag()]


def _answer(choices: Choices) -> None:
    call = choices.one_of(_CALLS)
    status = choices.one_of((200, 201, 400, 404, 409, 429, 500, 503))
    response = httpx2.Response(status, headers=_headers(choices), content=choices.rest())
    try:
        answers.read(response, call, "http://control-plane")
    except answers.Failed as failed:
        assert isinstance(failed.error, KvxferError)
        assert failed.seconds >= 0
