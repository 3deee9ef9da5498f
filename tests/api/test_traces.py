"""Spans arrive by OTLP and are read as the trace of a request; the number kept is bounded."""

from __future__ import annotations

import gzip
from collections.abc import Iterable

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvxfer.api.trace_store import TraceStore
from kvxfer.errors import UnknownTrace
from kvxfer.traces import TraceSpan

from .conftest import join, problem

PROTOBUF = {"Content-Type": "application/x-protobuf"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


def exported(
    request_id: str = "r", trace_id: str = TRACE, names: Iterable[str] = ("request",)
) -> bytes:
    """Returns spans as another vendor's exporter sends them."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "their-router"
    scope = resource.scope_spans.add()
    for number, name in enumerate(names, 1):
        span = scope.spans.add(
            trace_id=bytes.fromhex(trace_id),
            span_id=number.to_bytes(8, "big"),
            name=name,
            start_time_unix_nano=1_800_000_000_000_000_000 + number,
            end_time_unix_nano=1_800_000_000_500_000_000,
        )
        span.attributes.add(key="kvxfer.request_id").value.string_value = request_id
        span.attributes.add(key="a list").value.array_value.values.add().int_value = 1
        span.attributes.add(key="no number").value.double_value = float("nan")
        span.events.add(name="first token", time_unix_nano=1_800_000_000_250_000_000)
    return request.SerializeToString()


def zipped(content: bytes) -> bytes:
    """Compresses to the same bytes each time: they are part of a test's name."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_exported_spans_are_the_trace_of_a_request(api, encoding):
    body = exported("chat-1", names=("request", "x" * 1000))
    body = zipped(body) if encoding == "gzip" else body
    answer = await api.post(
        "/v1/traces", content=body, headers={**PROTOBUF, "Content-Encoding": encoding}
    )
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "application/x-protobuf"
    for name in ("chat-1", TRACE):
        found = (await api.get(f"/v1/traces/{name}")).json()
        assert found["request_id"] == name
        first, second = found["spans"]
        assert first == {
            "trace_id": TRACE,
            "span_id": "0000000000000001",
            "parent_id": None,
            "name": "request",
            "service": "their-router",
            "instance_id": "",
            "start": pytest.approx(1_800_000_000.0),
            "end": pytest.approx(1_800_000_000.5),
            "attributes": {"kvxfer.request_id": "chat-1"},
            "events": [{"name": "first token", "at": pytest.approx(1_800_000_000.25)}],
            "error": None,
        }
        assert second["name"] == "x" * 256


async def test_the_control_plane_adds_its_own_spans_if_the_caller_records_the_trace(api):
    await join(api, "p")
    await join(api, "d", "decode")
    await api.post("/v1/transfers", json={}, headers={"traceparent": PARENT})
    [span] = (await api.get(f"/v1/traces/{TRACE}")).json()["spans"]
    assert (span["service"], span["name"]) == ("control-plane", "POST /v1/transfers")
    assert span["parent_id"] == PARENT.split("-")[2]
    assert span["attributes"]["kvxfer.status"] == 201


@pytest.mark.parametrize(
    "traceparent",
    [
        PARENT[:-2] + "00",  # not recorded
        PARENT[:-1],
        PARENT.upper(),
        PARENT.replace(TRACE, "0" * 32),
        "ff" + PARENT[2:],
        PARENT + "-more",
        "",
    ],
)
async def test_no_span_is_kept_if_the_caller_does_not_record_the_trace(api, traceparent):
    await api.post("/v1/transfers", json={}, headers={"traceparent": traceparent})
    problem(await api.get(f"/v1/traces/{TRACE}"), 404, "unknown-trace")


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"\xff\xff", PROTOBUF, "no OTLP"),
        (exported()[:-3], PROTOBUF, "no OTLP"),
        (b"{}", {"Content-Type": "application/json"}, "application/x-protobuf"),
        (b"plain", {**PROTOBUF, "Content-Encoding": "gzip"}, "no gzip"),
        (zipped(b"x")[:-4], {**PROTOBUF, "Content-Encoding": "gzip"}, "ends early"),
        (zipped(bytes(9 << 20)), {**PROTOBUF, "Content-Encoding": "gzip"}, "send less"),
        (b"", {**PROTOBUF, "Content-Encoding": "br"}, "send gzip"),
        (exported(trace_id="00"), PROTOBUF, "ids of 1 and 8 bytes"),
    ],
)
async def test_an_invalid_export_is_refused_with_the_reason(api, body, headers, says):
    answer = await api.post("/v1/traces", content=body, headers=headers)
    assert says in problem(answer, 422, "invalid-argument")["detail"]


async def test_without_opentelemetry_no_spans_are_taken(api, monkeypatch):
    monkeypatch.setattr("kvxfer.api.routes.traces.is_installed", lambda: False)
    answer = await api.post("/v1/traces", content=exported(), headers=PROTOBUF)
    assert "kvxfer[otel]" in problem(answer, 501, "not-built")["detail"]


def span(trace: int, number: int) -> TraceSpan:
    return TraceSpan(
        trace_id=f"{trace:032x}",
        span_id=f"{number:016x}",
        name="x",
        service="worker",
        start=float(number),
        end=float(number),
        attributes={"kvxfer.request_id": f"request-{trace}"},
    )


def test_the_oldest_traces_make_room_for_new_ones():
    store = TraceStore(max_spans=10)
    for trace in range(50):
        store.add(span(trace, number) for number in range(3))
    assert len(store) == 9
    assert len(store.find("request-49").spans) == 3
    with pytest.raises(UnknownTrace, match="request-46"):
        store.find("request-46")
    assert len(store._by_request) == 3


def test_a_trace_without_end_takes_no_more_than_its_share():
    store = TraceStore(max_spans=10, max_spans_per_trace=4)
    store.add(span(1, number) for number in range(100))
    store.add([span(2, 0)])
    assert len(store.find("request-1").spans) == 4
    assert len(store) == 5


def test_spans_that_are_sent_again_are_kept_once():
    store = TraceStore()
    for _ in range(3):
        store.add([span(1, 0), span(1, 1)])
    assert len(store) == len(store.find("request-1").spans) == 2
