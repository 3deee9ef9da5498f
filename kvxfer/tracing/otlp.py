"""Reads the spans of an OTLP/HTTP request, as every OpenTelemetry exporter sends it.

A sender has shown only a token, so what is kept of a span is bounded.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import InvalidArgument
from kvxfer.traces import SpanEvent, TraceSpan

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

_MAX_BYTES: Final = 8 << 20
_MAX_TEXT: Final = 256
_MAX_ATTRIBUTES: Final = 32
_MAX_EVENTS: Final = 32
_TRACE_ID_BYTES: Final = 16
_SPAN_ID_BYTES: Final = 8
_ERROR: Final = 2


def read_spans(content: bytes, encoding: str = "identity") -> list[TraceSpan]:
    """Returns the spans of an ExportTraceServiceRequest in protobuf. `encoding` is its
    Content-Encoding. Raises InvalidArgument."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    try:
        request = ExportTraceServiceRequest.FromString(_decoded(content, encoding))
    except DecodeError as error:
        raise InvalidArgument(
            f"the body is no OTLP ExportTraceServiceRequest in protobuf ({error}); send "
            "http/protobuf"
        ) from None
    return list(spans_of(request.resource_spans))


def spans_of(resources: Iterable[ResourceSpans]) -> Iterator[TraceSpan]:
    """Yields the spans. Raises InvalidArgument for one without ids."""
    for of_resource in resources:
        who = _attributes(of_resource.resource.attributes)
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                if len(span.trace_id) != _TRACE_ID_BYTES or len(span.span_id) != _SPAN_ID_BYTES:
                    raise InvalidArgument(
                        f"a span has ids of {len(span.trace_id)} and {len(span.span_id)} bytes; "
                        f"send {_TRACE_ID_BYTES} and {_SPAN_ID_BYTES}"
                    )
                failed = span.status.code == _ERROR
                yield TraceSpan(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex() or None,
                    name=span.name[:_MAX_TEXT],
                    service=str(who.get("service.name", "unknown")),
                    instance_id=str(who.get("service.instance.id", "")),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes=_attributes(span.attributes),
                    events=tuple(
                        SpanEvent(name=event.name[:_MAX_TEXT], at=event.time_unix_nano / 1e9)
                        for event in span.events[:_MAX_EVENTS]
                    ),
                    error=(span.status.message[:_MAX_TEXT] or "error") if failed else None,
                )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, str | int | float | bool]:
    """Returns plain attributes; lists and the like are left out."""
    found: dict[str, str | int | float | bool] = {}
    for pair in pairs:
        kind = pair.value.WhichOneof("value")
        if kind in {"string_value", "int_value", "double_value", "bool_value"}:
            value: Any = getattr(pair.value, kind)
            if isinstance(value, float) and not math.isfinite(value):
                continue  # JSON has none
            found[pair.key[:_MAX_TEXT]] = value[:_MAX_TEXT] if isinstance(value, str) else value
        if len(found) == _MAX_ATTRIBUTES:
            break
    return found


def _decoded(content: bytes, encoding: str) -> bytes:
    """Decodes a body. Raises InvalidArgument, also for one that would be too large."""
    if encoding == "identity":
        return content
    if encoding != "gzip":
        raise InvalidArgument(f"Content-Encoding is {encoding!r}; send gzip, or none")
    inflate = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        decoded = inflate.decompress(content, _MAX_BYTES)
    except zlib.error as error:
        raise InvalidArgument(f"the body is no gzip ({error})") from None
    if not inflate.eof:
        raise InvalidArgument(f"the body ends early or has more than {_MAX_BYTES} bytes; send less")
    return decoded
