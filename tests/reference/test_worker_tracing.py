"""The spans of both workers of a transfer; none if the trace is not recorded."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import httpx2
import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import KvxferError
from kvxfer.reference.worker.app import make_app
from kvxfer.ticket import sign_ticket, verify_ticket
from kvxfer.tracing.tracer import Tracer
from verify.polling import eventually

from .tiny import TINY
from .workers import WorkerPair

pytestmark = pytest.mark.native

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
RECORDED = f"00-{TRACE}-{CALLER}-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(spans: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider(resource=Resource({"service.name": "worker"}))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return Tracer(provider)


async def both(
    workers: WorkerPair, tracer: Tracer | None, headers: dict[str, str]
) -> list[httpx2.Response]:
    """Sends a request to both workers, as a router does."""
    body = workers.request("traced", max_tokens=4).model_dump()
    sides = []
    for worker in (workers.prefill, workers.decode):
        transport = httpx2.ASGITransport(make_app(worker.service, tracer))
        client = httpx2.AsyncClient(transport=transport, base_url="http://worker")
        sides.append(client.post("/v1/completions", json=body, headers=headers))
    return await asyncio.gather(*sides)


async def test_a_recorded_request_has_spans_down_to_each_layer(
    workers: WorkerPair, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    answers = await both(workers, tracer, {"traceparent": RECORDED, "X-Request-ID": "r-1"})
    assert [answer.status_code for answer in answers] == [200, 200]
    found = spans.get_finished_spans()
    names = {span.context.span_id: span.name for span in found}

    def below(span: ReadableSpan) -> str:
        assert span.parent is not None
        return names.get(span.parent.span_id, f"{span.parent.span_id:016x}")

    served = [(CALLER, "POST /v1/completions")]
    inside = "POST /v1/completions"
    assert sorted((below(span), span.name) for span in found) == sorted(
        served * 2
        + [(inside, name) for name in ("prefill.compute", "kv.send")]
        + [(inside, name) for name in ("kv.receive", "decode.first_step")]
        + [("kv.send", "kv.write")] * TINY.num_layers
    )
    assert {f"{span.context.trace_id:032x}" for span in found} == {TRACE}
    by_name = {span.name: dict(span.attributes or {}) for span in found}
    assert by_name[inside]["kvxfer.request_id"] == "r-1"
    assert by_name["kv.send"]["kvxfer.fabric"] == workers.prefill.engine.fabrics[0]
    written = [dict(s.attributes or {})["kvxfer.bytes"] for s in found if s.name == "kv.write"]
    assert sum(written) == by_name["kv.receive"]["kvxfer.bytes"] > 0
    assert workers.all_blocks_free()


@pytest.mark.parametrize("workers", ["local"], indirect=True)
async def test_the_span_of_a_prompt_shows_that_it_waited_for_earlier_ones(
    workers: WorkerPair, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    ended, prefill = threading.Event(), workers.prefill
    earlier = asyncio.create_task(prefill.service._compute.run(ended.wait))
    await asyncio.sleep(0)
    later = asyncio.create_task(both(workers, tracer, {"traceparent": RECORDED}))
    await eventually(lambda: prefill.service._compute._under_way == 2)
    ended.set()
    assert [answer.status_code for answer in await later] == [200, 200]
    await earlier
    found = {span.name: span for span in spans.get_finished_spans()}
    waited, computed = found["prefill.wait"], found["prefill.compute"]
    assert waited.parent == computed.parent
    assert waited.end_time is not None
    assert computed.start_time is not None
    assert waited.end_time <= computed.start_time


@pytest.mark.parametrize("workers", ["local"], indirect=True)
@pytest.mark.parametrize("header", [{}, {"traceparent": RECORDED[:-1] + "0"}])
async def test_no_span_is_kept_of_a_request_that_is_not_recorded(
    workers: WorkerPair, tracer: Tracer, spans: InMemorySpanExporter, header: dict[str, str]
) -> None:
    answers = await both(workers, tracer, header)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert not spans.get_finished_spans()


@pytest.mark.parametrize("workers", ["local"], indirect=True)
async def test_a_ticket_carries_the_trace_to_an_engine_that_sees_no_headers(
    workers: WorkerPair, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    """vLLM's connector, for example, sees no headers."""
    params = workers.request("traced").kv_transfer_params
    claims = verify_ticket(params.ticket, workers.cluster_key, now=SYSTEM_CLOCK.unix())
    ticket = sign_ticket(replace(claims, traceparent=RECORDED), workers.cluster_key)
    endpoint = workers.decode.service._endpoint
    endpoint._tracer = tracer
    receiver = await endpoint.decode_session(ticket, params.decode_dials or "", 1)
    await receiver.cancel("enough")
    await eventually(lambda: bool(spans.get_finished_spans()))  # prefill has answered
    [span] = spans.get_finished_spans()
    assert (span.name, f"{span.context.trace_id:032x}") == ("kv.receive", TRACE)
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == CALLER
    assert dict(span.attributes or {})["error.type"] == "transfer-cancelled"
    assert "enough" in (span.status.description or "")


@pytest.mark.parametrize("workers", ["local"], indirect=True)
async def test_a_transfer_that_fails_before_it_begins_has_a_span_that_says_why(
    workers: WorkerPair, tracer: Tracer, spans: InMemorySpanExporter
) -> None:
    params = workers.request("traced").kv_transfer_params
    claims = verify_ticket(params.ticket, workers.cluster_key, now=SYSTEM_CLOCK.unix())
    ticket = sign_ticket(replace(claims, traceparent=RECORDED), workers.cluster_key)
    endpoint = workers.decode.service._endpoint
    endpoint._tracer = tracer
    with pytest.raises(KvxferError):
        await endpoint.decode_session(ticket, "kvx://127.0.0.1:9/" + "0" * 32, 1)
    [span] = spans.get_finished_spans()
    assert dict(span.attributes or {})["error.type"] == "connect-failed"
