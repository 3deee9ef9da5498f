"""Errors of workers: errors that kvxfer has a name for, or the worker's own."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from kvxfer.errors import (
    KvxferError,
    LayoutMismatch,
    TransferError,
    WorkerError,
    WorkerKeyRefused,
    by_code,
)
from kvxfer.router.errors import told_by
from kvxfer.unreadable import UNREADABLE

_FROM_SERVER: Final = 500
_JSON: Final = {"Content-Type": "application/json"}


def error_of(address: str, status: int, content: bytes, headers: Mapping[str, str]) -> KvxferError:
    """Returns the error of a worker's answer: one of kvxfer if it is a problem document."""
    try:
        problem = msgspec.json.decode(content, type=dict[str, Any])
    except UNREADABLE:
        problem = {}
    code, detail = problem.get("code"), problem.get("detail")
    if isinstance(code, str) and isinstance(detail, str):
        return _named(code, detail)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return WorkerKeyRefused(
            f"the worker at {address} does not let this router in (HTTP {status}); write the key "
            "that it asks for into the router's --worker-key-file"
        )
    return _own(address, status, content, headers)


def error_event(address: str, event: Mapping[str, Any], data: bytes) -> KvxferError | None:
    """Returns the error of an event of a stream; None if it is no error."""
    problem = event.get("error")
    if not isinstance(problem, Mapping):
        return None
    code = problem.get("code")
    if isinstance(code, str):
        return _named(code, str(problem.get("message")))
    if not isinstance(code, int):  # Anthropic's API has only types
        code = 400 if "request" in str(problem.get("type")).lower() else _FROM_SERVER
    return _own(address, code, data, _JSON)


def is_refusal(error: object) -> bool:
    """Whether a worker's own error is about the request, so that another would answer the same."""
    return isinstance(error, WorkerError) and (
        error.status < _FROM_SERVER or error.status == HTTPStatus.NOT_IMPLEMENTED
    )


def _own(address: str, status: int, content: bytes, headers: Mapping[str, str]) -> WorkerError:
    told = told_by(content)
    said = f": {told['message']}" if told else ""
    return WorkerError(
        f"the worker at {address} answered HTTP {status}{said}", status, content, headers
    )


def _named(code: str, detail: str) -> KvxferError:
    kind = by_code(code)
    if kind in (KvxferError, LayoutMismatch, WorkerError):
        return TransferError(f"{detail} [{code}]")
    return kind(detail)
