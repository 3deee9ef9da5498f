"""Seeds of data that arrives by HTTP: answers of the control plane and workers, clients' bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any


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


def router_bodies() -> Iterator[bytes]:
    def body(route: int, **members: Any) -> bytes:
        return bytes([route]) + json.dumps({"model": "m", **members}).encode()

    prompts: tuple[Any, ...] = ("text", [1, 2], ["a"], [[1], [2]], ["a", "b"], None, [], [1, "a"])
    for prompt in prompts:
        yield body(0, prompt=prompt, stream="on", prompt_logprobs=1.0)
    for member in ("prompt_embeds", "echo", "use_beam_search", "request_id"):
        yield body(0, prompt="a", logprobs=0, **{member: "1"})
    yield body(0, prompt="a", max_tokens=0)
    for priority in (-1000, 1001, True):
        yield body(0, prompt="a", priority=priority)
    yield body(0, kv_transfer_params={})
    for wrong in (b"{", b"[]", b"", b'{"a": NaN}', b'{"prompt": "\\ud800"}', b"\xff", b"{}"):
        yield b"\x00" + wrong
    parts = [{"type": "text", "text": "t"}, {"type": "image_url"}, "x"]
    for content in ("text", parts, None, 7):
        for route in (1, 3):
            messages = [{"role": "user", "content": content}]
            yield body(route, messages=messages, system=content, max_tokens=1)
    for member in ("echo", "use_beam_search", "return_prompt_text"):
        yield body(1, messages=[], **{member: True})
    for member in ("background", "previous_response_id", "previous_input_messages"):
        yield body(2, input="text", **{member: True})
    yield body(2, input=[{"type": "input_image"}], tools=[{"type": "function"}, {"type": "mcp"}])
    nested: Any = "deep"
    for _ in range(20):
        nested = [{"content": nested}]
    yield body(2, input=nested)
    for prompt in ("text", ["a"], None):
        yield body(4, text=prompt, input_ids=[1], input_embeds=[0.5])
    yield b"\x05\x07\x80\x01m"
    for edge in range(0xE0, 0xEC):
        yield b"\x05" + bytes([edge]) + b"\x80\x01m"
    params = {"ticket": "a.b.c", "prefill_engine_address": "kvx://h", "prefill_rank_addresses": []}
    for more in ({}, {"handshake": "brokered"}, {"prefill_rank_addresses": [1]}, {"ticket": 1}):
        yield b"\x06" + json.dumps({**params, **more}).encode()
    yield b"\x06{}"
    details = {
        name: {"a": None, "b": 1} for name in ("prompt_tokens_details", "input_tokens_details")
    }
    choices = [{"prompt_logprobs": [None]}, {}, 7]
    usage = {**details, "input_tokens": 1}
    whole = {"usage": usage, "choices": choices, "prompt_logprobs": [None]}
    for answer in (whole, {"response": whole}, {"choices": 1}, {"usage": 1, "message": whole}):
        for route in range(5):
            yield b"\x07" + bytes([route]) + json.dumps(answer).encode()
    errors: tuple[Any, ...] = (
        {"message": "m", "code": 400},
        {"code": "ticket-invalid"},
        {"code": "layout-mismatch"},
        {"type": "x"},
        7,
        None,
    )
    for error in errors:
        yield b"\x07\x00" + json.dumps({"error": error}).encode()
    yield b'\x07\x00{"code": "no-capacity", "detail": "d"}'
    stream = b": c\n\nevent: e\ndata: 1\ndata:2\n\ndata: x\r\n\r\ndata: y\r\rdata: half"
    for size in (0, 2, 255):
        yield b"\x08" + bytes([size]) + stream
    yield b"\x08\xff" + b"data: " + b"x" * 600
    yield body(9, input="text")


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
