"""The latest traces, in memory: for an operator without a collector, or for one request now."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvxfer.errors import UnknownTrace
from kvxfer.traces import Trace, TraceSpan
from kvxfer.tracing.setup import is_installed, resource
from kvxfer.tracing.span import REQUEST_ID

if TYPE_CHECKING:
    from kvxfer.tracing.tracer import Tracer

MAX_SPANS: Final = 20_000
MAX_SPANS_PER_TRACE: Final = 2_000

_ATTRIBUTE: Final = REQUEST_ID


class TraceStore:
    """A bounded store: the oldest traces are dropped first, each as a whole. Event loop only."""

    def __init__(
        self, max_spans: int = MAX_SPANS, max_spans_per_trace: int = MAX_SPANS_PER_TRACE
    ) -> None:
        self._max_spans, self._max_per_trace = max_spans, max_spans_per_trace
        # Keyed by trace id and span id, so that a span that is sent again is ignored.
        self._traces: OrderedDict[str, dict[str, TraceSpan]] = OrderedDict()
        self._by_request: dict[str, str] = {}
        self._count = 0

    def add(self, spans: Iterable[TraceSpan]) -> None:
        for span in spans:
            trace = self._traces.setdefault(span.trace_id, {})
            if span.span_id in trace or len(trace) >= self._max_per_trace:
                continue
            trace[span.span_id] = span
            self._count += 1
            if isinstance(request_id := span.attributes.get(_ATTRIBUTE), str) and request_id:
                self._by_request[request_id] = span.trace_id
        while self._count > self._max_spans:
            self._forget_oldest()

    def find(self, request_id: str) -> Trace:
        """Returns all spans of a request, or of the trace with that id. Raises UnknownTrace."""
        trace = self._traces.get(self._by_request.get(request_id, request_id))
        if not trace:
            raise UnknownTrace(
                f"there is no trace of {request_id!r}: it was not recorded, has not arrived yet, "
                "went to another replica, or is too old",
                request_id=request_id,
            )
        spans = sorted(trace.values(), key=lambda span: (span.start, span.end))
        return Trace(request_id=request_id, spans=tuple(spans))

    def __len__(self) -> int:
        """Returns the number of spans."""
        return self._count

    def _forget_oldest(self) -> None:
        trace_id, spans = self._traces.popitem(last=False)
        self._count -= len(spans)
        for span in spans.values():
            request_id = span.attributes.get(_ATTRIBUTE)
            if self._by_request.get(str(request_id)) == trace_id:
                del self._by_request[str(request_id)]


def own_tracer(store: TraceStore) -> Tracer | None:
    """Makes a tracer whose spans go into the store of this process; None without OpenTelemetry.

    It begins no trace: only requests that bring one have spans.
    """
    if not is_installed():
        return None
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

    from kvxfer.tracing.otlp import spans_of
    from kvxfer.tracing.tracer import Tracer, provider_of

    class Keep(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            store.add(spans_of(encode_spans([span]).resource_spans))

    provider = provider_of(resource("control-plane"))
    provider.add_span_processor(Keep())
    return Tracer(provider)
