"""The logs of a process: lines for people or JSON, with the request's id and without secrets."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal

import structlog
from structlog.typing import Processor

# kvxfer itself logs no secret. These are for the errors and headers of others.
_SECRETS: Final = (
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]+"),
    re.compile(r"()\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),  # a ticket is a JWT
)
_SECRET_NAMES: Final = frozenset({"authorization", "ticket", "token", "cluster_key"})
_REDACTED: Final = "[redacted]"
AUDIT: Final = "kvxfer.audit"
"""The logger of decisions about the fleet; it logs at info, whatever the level of the others."""


def configure_logging(
    level: Literal["debug", "info", "warning", "error"], log_format: Literal["text", "json"]
) -> None:
    """Sends the log records of every library of this process to stderr in one form."""
    chain: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=0)
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=chain,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx2 logs every request at info; the server's access log has it too.
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    logging.getLogger(AUDIT).setLevel(logging.INFO)


def redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Removes tokens and tickets from an event, wherever they stand. A structlog processor."""
    for name, value in event.items():
        if name.lower() in _SECRET_NAMES:
            event[name] = _REDACTED
        elif isinstance(value, str):
            event[name] = _without_secrets(value)
    return event


def _without_secrets(text: str) -> str:
    for pattern in _SECRETS:
        text = pattern.sub(rf"\1{_REDACTED}", text)
    return text
