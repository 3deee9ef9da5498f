"""Records of the traces that the control plane keeps, shared by REST API, client and CLI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, field

from kvxfer.record import Record


class SpanEvent(Record, frozen=True, kw_only=True):
    """An event during a span."""

    name: Annotated[str, Meta(examples=["accepted"])]
    at: Annotated[float, Meta(examples=[1795046400.013])]
    """Seconds since the Unix epoch."""


class TraceSpan(Record, frozen=True, kw_only=True):
    """A piece of work. Times are seconds since the Unix epoch, by the clock of its host."""

    trace_id: Annotated[str, Meta(examples=["4bf92f3577b34da6a3ce929d0e0e4736"])]
    span_id: Annotated[str, Meta(examples=["00f067aa0ba902b7"])]
    parent_id: str | None = None
    """Span of the caller; None without one."""
    name: Annotated[str, Meta(examples=["kv.write"])]
    service: Annotated[str, Meta(examples=["worker"])]
    """Program that did the work: router, control-plane, worker, vllm, or the value of
    OTEL_SERVICE_NAME."""
    instance_id: str = ""
    start: Annotated[float, Meta(examples=[1795046400.0125])]
    end: Annotated[float, Meta(examples=[1795046400.0142])]
    attributes: Annotated[
        Mapping[str, str | int | float | bool],
        Meta(examples=[{"kvxfer.layer": 3, "kvxfer.bytes": 65536}]),
    ] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None


class Trace(Record, frozen=True, kw_only=True):
    """All spans of one request."""

    request_id: Annotated[str, Meta(examples=["chat-7f3a"])]
    spans: tuple[TraceSpan, ...]
    """Spans in the order of their start."""
