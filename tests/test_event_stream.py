from __future__ import annotations

import pytest

from kvxfer.event_stream import EventParser, ServerSentEvent

STREAM = (
    b": comment\n"
    b"retry: 1000\n\n"
    b"event: snapshot\nid: 1\ndata: {}\n\n"
    b"data: one\r\ndata: two\r\n\r\n"
    b"event: nothing\n\n"
    b"id: 2\rdata:no space\r\r"
    b"unknown: field\ndata: caf\xc3\xa9 \xe2\x80\xa8 line\n\n"
    b"data\n\n"
)
EVENTS = [
    ServerSentEvent("snapshot", "{}", "1"),
    ServerSentEvent("message", "one\ntwo", "1"),
    ServerSentEvent("message", "no space", "2"),
    ServerSentEvent("message", "café \u2028 line", "2"),
    ServerSentEvent("message", "", "2"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_bytes_are_cut(size):
    parser = EventParser()
    events = []
    for start in range(0, len(STREAM), size):
        events += parser.feed(STREAM[start : start + size])
    assert events == EVENTS


def test_event_is_complete_with_its_empty_line_only():
    parser = EventParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [ServerSentEvent("message", "x", None)]


def test_id_with_a_null_is_ignored():
    assert EventParser().feed(b"id: 1\0\ndata: x\n\n") == [ServerSentEvent("message", "x", None)]
