"""Spans of OpenTelemetry behind the interface of `span.py`."""

from __future__ import annotations

import secrets
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvxfer.tracing.span import HEADER, Span, is_recorded
from kvxfer.version import __version__

_PROPAGATOR: Final = TraceContextTextMapPropagator()


class _SystemIds(IdGenerator):
    """Ids from the system's generator. OpenTelemetry takes Python's, which inference engines seed:
    spans of two processes with one seed would have the same ids."""

    def generate_span_id(self) -> int:
        return 1 + secrets.randbelow(2**64 - 1)

    def generate_trace_id(self) -> int:
        return 1 + secrets.randbelow(2**128 - 1)


def provider_of(resource: Resource) -> TracerProvider:
    """Makes a provider without a processor. Tracer.close() ends it."""
    return TracerProvider(resource=resource, id_generator=_SystemIds(), shutdown_on_exit=False)


class Tracer:
    """The tracer of one process, which begins its spans. Any thread."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("kvxfer", __version__)

    def root(
        self, name: str, traceparent: str = "", **attributes: str | int | float
    ) -> Span | None:
        """Begins the span of a request, in its client's trace if it has one. Returns None if the
        trace is not recorded."""
        return self._begin(name, traceparent, attributes)

    def join(self, name: str, traceparent: str, **attributes: str | int | float) -> Span | None:
        """Begins a span in a caller's trace. Returns None if that is not recorded."""
        return self._begin(name, traceparent, attributes) if is_recorded(traceparent) else None

    def close(self) -> None:
        """Sends what is left, within the exporter's own deadline."""
        self._provider.shutdown()

    def _begin(
        self, name: str, traceparent: str, attributes: dict[str, str | int | float]
    ) -> Span | None:
        context = _PROPAGATOR.extract({HEADER: traceparent} if traceparent else {})
        begun = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes=_named(attributes)
        )
        return _Span(self._tracer, begun) if begun.is_recording() else None


class _Span:
    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, begun: trace.Span) -> None:
        self._tracer, self._span = tracer, begun

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def child(
        self, name: str, start_ns: int | None = None, /, **attributes: str | int | float
    ) -> Span:
        begun = self._tracer.start_span(
            name,
            trace.set_span_in_context(self._span),
            attributes=_named(attributes),
            start_time=start_ns,
        )
        return _Span(self._tracer, begun)

    def set(self, **attributes: str | int | float) -> None:
        self._span.set_attributes(_named(attributes))

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def end(self, error: BaseException | None = None, *, end_ns: int | None = None) -> None:
        if error is not None and self._span.is_recording():
            code = getattr(error, "code", type(error).__name__)
            self._span.set_attribute("error.type", code)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end(end_ns)


def _named(attributes: dict[str, str | int | float]) -> dict[str, str | int | float]:
    """Adds the prefix of kvxfer's own attributes."""
    return {f"kvxfer.{name}": value for name, value in attributes.items()}
