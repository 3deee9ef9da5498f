"""Bodies about traces."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

_SPAN: JsonDict = {
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "span_id": "00f067aa0ba902b7",
    "parent_id": "53995c3f42cd8ad8",
    "name": "kv.write",
    "service": "worker",
    "instance_id": "prefill-0",
    "start": 1795046400.0125,
    "end": 1795046400.0142,
    "attributes": {"kvxfer.layer": 3, "kvxfer.bytes": 65536},
    "events": [{"name": "accepted", "at": 1795046400.013}],
    "error": None,
}


class SpanEvent(BaseModel):
    """Something that happened during a span."""

    model_config = ConfigDict(from_attributes=True)

    name: str
    at: float = Field(description="Seconds since the Unix epoch.")


class TraceSpan(BaseModel):
    """A piece of work. Times are seconds since the Unix epoch, by the clock of its host."""

    model_config = ConfigDict(from_attributes=True)

    trace_id: str
    span_id: str
    parent_id: str | None = Field(None, description="Null where nothing called it.")
    name: str
    service: str = Field(description="Which program, or what OTEL_SERVICE_NAME says.")
    instance_id: str = ""
    start: float
    end: float
    attributes: dict[str, Any] = Field(
        default_factory=dict, description="Strings, numbers and booleans."
    )
    events: list[SpanEvent] = []
    error: str | None = None


class Trace(BaseModel):
    """All that was sent about one request."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={"examples": [{"request_id": "chat-7f3a", "spans": [_SPAN]}]},
    )

    request_id: str
    spans: list[TraceSpan] = Field(description="By their start.")
