"""An exporter of spans that logs once that its endpoint is unavailable, not with each batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_log = logging.getLogger(__name__)
# The logger of OpenTelemetry's own lines about each attempt at each batch.
_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
_ours = threading.local()


class _NotOurs(logging.Filter):
    """A filter that passes only the lines of other exporters in this process."""

    def filter(self, record: logging.LogRecord) -> bool:
        said: list[str] | None = getattr(_ours, "said", None)
        if said is None:
            return True
        said.append(record.getMessage())
        return False


_filter: Final = _NotOurs()


class TroubleToldOnce(SpanExporter):
    """An exporter that uses another one, and logs once that it fails. One thread."""

    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter, self._url = exporter, url
        self._away = False
        logging.getLogger(_LOGGER).addFilter(_filter)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _ours.said = said = list[str]()
        try:
            result = self._exporter.export(spans)
        finally:
            del _ours.said
        away = result is not SpanExportResult.SUCCESS
        if away and not self._away:
            why = said[0] if said else "no reason was given"
            _log.warning("spans do not reach %s, and are lost meanwhile: %s", self._url, why)
        elif self._away and not away:
            _log.info("spans reach %s again", self._url)
        self._away = away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
