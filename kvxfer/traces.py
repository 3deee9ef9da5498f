"""A trace as the control plane keeps it: records that REST API, client and command line share."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field


class SpanEvent(Struct, frozen=True, kw_only=True):
    """Something that happened during a span."""

    name: str
    at: float
    """Seconds since the Unix epoch."""


class TraceSpan(Struct, frozen=True, kw_only=True):
    """A piece of work. Times are seconds since the Unix epoch, by the clock of its host."""

    trace_id: str
    span_id: str
    parent_id: str | None = None
    """None where nothing called it."""
    name: str
    service: str
    """Which program: router, control-plane, worker, vllm, or what OTEL_SERVICE_NAME says."""
    instance_id: str = ""
    start: float
    end: float
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    error: str | None = None


class Trace(Struct, frozen=True, kw_only=True):
    """All that was sent about one request."""

    request_id: str
    spans: tuple[TraceSpan, ...]
    """By their start."""
