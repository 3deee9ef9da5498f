"""Errors of a worker's HTTP API as problem documents (RFC 9457), like the control plane's."""

from __future__ import annotations

from typing import Final, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from kvxfer.errors import (
    BlockPoolExhausted,
    ChecksumMismatch,
    ControlPlaneError,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    EngineClosed,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    LeaseExpired,
    PeerError,
    PromptTooLong,
    RequestAborted,
    TicketInvalid,
    TransferCancelled,
    TransferRefused,
    WrongVersion,
)

MEDIA_TYPE: Final = "application/problem+json"

_STATUS: Final[dict[type[KvxferError], int]] = {
    InvalidArgument: 422,
    PromptTooLong: 422,
    TicketInvalid: 403,
    LayoutMismatch: 409,
    TransferCancelled: 409,
    TransferRefused: 409,
    WrongVersion: 409,
    RequestAborted: 503,
    BlockPoolExhausted: 503,
    EngineClosed: 503,
    PeerError: 502,
    ChecksumMismatch: 502,
    LeaseExpired: 504,
    DeadlineExceeded: 504,
    # Only in a brokered handshake.
    ControlPlaneUnavailable: 503,
    ControlPlaneError: 502,
}


def install(app: FastAPI) -> None:
    """Makes every KvxferError and every malformed body answer with a problem document."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(request: Request, error: Exception) -> JSONResponse:
        known = cast(KvxferError, error)
        status = next((_STATUS[base] for base in type(known).__mro__ if base in _STATUS), 500)
        return _answer(request, status, known.code, str(known))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> JSONResponse:
        first = cast(RequestValidationError, error).errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        detail = f"{field}: {first['msg']}" if field else str(first["msg"])
        return _answer(request, 422, InvalidArgument.code, detail)


def _answer(request: Request, status: int, code: str, detail: str) -> JSONResponse:
    body = {
        "type": f"urn:kvxfer:error:{code}",
        "title": code.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
        "code": code,
        "instance": request.url.path,
    }
    return JSONResponse(body, status, media_type=MEDIA_TYPE)
