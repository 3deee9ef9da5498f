"""Seeds of data that comes by HTTP: answers of the control plane and workers, clients' bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator


def answers() -> Iterator[bytes]:
    events = "id: 7\nevent: change\ndata: {}\ndata: x\n\n: comment\r\n\rdata:a\u2028b\r\r\n"
    yield b"\x00\x03" + events.encode()
    yield b"\x00\xff" + b"data: \xff\xfe\n\n"
    yield b"\x00\x40" + b"data: " + b"x" * 600
    yield b"\x00\xff" + b"data: 400\n" * 80
    yield b"\x01\x00" + (b"\xff" + b"x" * 255) * 3
    yield b"\x00\x00" + b"id\0: 1\nid: a\0\ndata\n\n"
    change = b"event: change\nid: 1\ndata: {"
    yield b"\x01\x01\x05" + bytes([len(change)]) + change + b"\x03}\n\n"
    yield b"\x01\x00\x1aevent: snapshot\ndata: {}\n\n\x0cdata: [1]\n\n"
    problem = {"type": "about:blank", "title": "t", "status": 429, "detail": "d"}
    codes = (
        "rate-limited",
        "layout-mismatch",
        "no-capacity",
        "internal-error",
        "?",
        "lease-expired",
    )
    for code in codes:
        body = json.dumps({**problem, "code": code, "message": "m", "self": 1, "field": "f"})
        yield b"\x02\x00\x05\x00\x00\x00" + body.encode()
        yield b"\x03\x00" + body.encode()
    for seconds in ("1.5", "1e308", "1" + "0" * 400, '"x"', "-3"):
        body = f'{{"code": "rate-limited", "detail": "d", "retry_after_seconds": {seconds}}}'
        yield b"\x02\x00\x05\x01\x03120\x01\x03abc\x01\x01r" + body.encode()
    yield b"\x02\x01\x00\x00\x01\x031.5\x00[]"
    yield b"\x02\x00\x00\x01\x02\xff\xb2\x01\x02\xc3\xa9\x00{}"
    yield b"\x02\x00\x07\x00\x00\x00not json"
    for seconds in ("1.5", "1" + "0" * 400, "-3"):
        body = f'{{"code": "rate-limited", "detail": "d", "retry_after_seconds": {seconds}}}'
        yield b"\x02\x00\x05" + b"\x01\x03120" + b"\x00\x00" + body.encode()
    for stale in (b"1.5", b"old"):
        yield b"\x02\x01\x00" + b"\x00\x01\x03" + stale + b"\x00" + b'{"instances": []}'
    yield (
        b"\x02\x00\x05" + b"\x01\x03120" + b"\x00\x00" + b'{"code": "rate-limited", "detail": "d"}'
    )
    snapshot = b'event: snapshot\ndata: {"id": 1, "instances": []}\n\n'
    yield b"\x01\x00" + bytes([len(snapshot)]) + snapshot
    for error in ({"message": "m"}, {"code": 1}, "text", None):
        yield b"\x03\x00" + json.dumps({"error": error}).encode()


def router_bodies() -> Iterator[bytes]:
    completion = {"model": "m", "prompt": "text", "stream": True, "max_tokens": 4}
    yield b"\x00" + json.dumps({**completion, "stream_options": {"include_usage": True}}).encode()
    yield b"\x00" + json.dumps({**completion, "prompt": [1, 2, 3], "extra": [{}]}).encode()
    wrong = ({"prompt": ["a"]}, {"prompt": None}, {"model": ""}, {"kv_transfer_params": {}})
    for other in wrong:
        yield b"\x00" + json.dumps({**completion, **other}).encode()
    yield b"\x00{" + b"\x00[]" + b"\x00"
    yield b"\x00[]"
    parts = [{"type": "text", "text": "t"}, {"type": "image_url"}, "x"]
    for content in ("text", parts, None, 7):
        chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
        yield b"\x01" + json.dumps(chat).encode()
    yield b"\x01" + json.dumps({"model": "m", "messages": []}).encode()
    yield b"\x02\x07\x80\x01m"
    for edge in range(0xE0, 0xEC):
        yield b"\x02" + bytes([edge]) + b"\x80\x01m"
    params = {"ticket": "a.b.c", "prefill_engine_address": "kvx://h", "prefill_rank_addresses": []}
    for more in ({}, {"handshake": "brokered"}, {"prefill_rank_addresses": [1]}, {"ticket": 1}):
        yield b"\x03" + json.dumps({**params, **more}).encode()
    yield b"\x03{}"


def sglang_bootstrap() -> Iterator[bytes]:
    put = b"\x00\x05"
    for length in range(4):
        yield put + bytes([length]) + b"GET /health HTTP/1.1\r\n\r\n"
    yield b"\x00\x00\x00" + b"GET /route?engine_rank=0 HTTP/1.0\r\n\r\n"
    yield b"\x01\x10" + b"GET / HTTP/1.0\r\n" + b"PUT /route HTTP/1.1\r\n\r\n"
    yield put + b"\x00" + b"PUT /route HTTP/1.0\r\nContent-Length: 3\r\n\r\na.b"
    yield put + b"\x00" + b"DELETE /route HTTP/9\r\n\r\n"


def spans() -> Iterator[bytes]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    for spans_of_each in ((1,), (3, 1), (1,) * 6, (40,)):
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = "router"
        scope = resource.scope_spans.add()
        for trace, count in enumerate(spans_of_each):
            for number in range(count):
                span = scope.spans.add(
                    trace_id=bytes([trace + 1]) * 16,
                    span_id=bytes([number + 1]) * 8,
                    parent_span_id=bytes(8 if number else 0),
                    name="n" * (300 if number else 3),
                    end_time_unix_nano=2**64 - 1,
                )
                span.attributes.add(key="kvxfer.request_id").value.string_value = f"r-{trace}"
                span.attributes.add(key="x").value.double_value = float("nan")
                for each in range(40 if count == 1 else 0):
                    span.attributes.add(key=f"a{each}").value.int_value = each
                    span.events.add(name="e", time_unix_nano=each)
                span.status.code = 2 if number else 0
        yield b"\x00" + request.SerializeToString()
        yield b"\x01" + gzip.compress(request.SerializeToString(), mtime=0)
    scope.spans.add(trace_id=b"short")
    yield b"\x00" + request.SerializeToString()
    yield b"\x01" + gzip.compress(b"x", mtime=0)[:-3]
    yield b"\x01" + gzip.compress(bytes(9 << 20), mtime=0)
    yield b"\x01no gzip"
    yield b"\x00\xff\xff"
    yield b"\x0000-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
