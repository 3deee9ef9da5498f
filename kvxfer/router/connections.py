"""Connections to workers: pooled, and patient only where a deadline of the request takes over."""

from __future__ import annotations

from typing import Final

import httpx2

_CONNECT_SECONDS: Final = 2.0
_WRITE_SECONDS: Final = 10.0
# Shorter than what engines wait (vLLM: 5 s), so that no request meets a connection being closed.
_IDLE_SECONDS: Final = 2.0
_IDLE_CONNECTIONS: Final = 512


def worker_client(transport: httpx2.AsyncBaseTransport | None = None) -> httpx2.AsyncClient:
    """Connections to workers, kept open. How long an answer may take is its reader's business."""
    return httpx2.AsyncClient(
        timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS, write=_WRITE_SECONDS),
        limits=httpx2.Limits(
            max_connections=None,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_SECONDS,
        ),
        transport=transport,
        trust_env=False,
    )
