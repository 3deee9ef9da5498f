"""Spans as exporters send them, and the store that keeps them."""

from __future__ import annotations

import json

import msgspec

from kvxfer.api.trace_store import TraceStore
from kvxfer.errors import InvalidArgument, UnknownTrace
from kvxfer.tracing.otlp import read_spans
from kvxfer.tracing.span import is_recorded
from verify.fuzz.python.choices import Choices

DECODERS = {"kvxfer/tracing/otlp.py": None, "api/trace_store.py": ["TraceStore"]}


def run(data: bytes) -> None:
    choices = Choices(data)
    encoding = choices.one_of(("identity", "gzip"))
    content = choices.rest()
    is_recorded(content.decode("latin-1"))
    try:
        spans = read_spans(content, encoding)
    except InvalidArgument:
        return
    store = TraceStore(max_spans=4, max_spans_per_trace=2)
    store.add(spans)
    assert len(store) <= 4
    for span in spans:
        try:
            found = store.find(span.trace_id)
        except UnknownTrace:  # it was evicted for later ones
            continue
        assert 1 <= len(found.spans) <= 2
        text = json.dumps(msgspec.to_builtins(found), allow_nan=False)
        assert len(text) < 2 * 64 * 1024
