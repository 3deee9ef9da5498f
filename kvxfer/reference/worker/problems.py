"""Errors of a worker's HTTP API as problem documents (RFC 9457), like the control plane's."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    InvalidArgument,
    KvxferError,
)

MEDIA_TYPE: Final = "application/problem+json"


def install(app: FastAPI) -> None:
    """Makes every KvxferError and every malformed body answer with a problem document."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(request: Request, error: Exception) -> JSONResponse:
        known = cast(KvxferError, error)
        return _answer(request, _status(known), known.code, str(known))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> JSONResponse:
        first = cast(RequestValidationError, error).errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:])
        detail = f"{field}: {first['msg']}" if field else str(first["msg"])
        return _answer(request, 422, InvalidArgument.code, detail)


def _status(error: KvxferError) -> int:
    # In a brokered handshake, the control plane refuses the worker, not the worker the request.
    refused = isinstance(error, ControlPlaneError)
    if refused and not isinstance(error, ControlPlaneUnavailable):
        return HTTPStatus.BAD_GATEWAY
    return error.status


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
