"""Errors as OpenAI's API has them: a status, and one object that says what is wrong."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus
from typing import Any, Final, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvxfer.errors import (
    BlockPoolExhausted,
    BodyTooLarge,
    ControlPlaneError,
    ControlPlaneUnavailable,
    DeadlineExceeded,
    Forbidden,
    InvalidArgument,
    KvxferError,
    LeaseExpired,
    NoCapacity,
    PromptTooLong,
    RateLimited,
    Unauthenticated,
)
from kvxfer.web.request_log import REQUEST_ID_HEADER, REQUEST_ID_KEY

_log = logging.getLogger("kvxfer.router")

RETRY_AFTER_SECONDS: Final = 1.0


class UnknownModel(KvxferError):
    """No instance runs the model that a request names."""

    code = "unknown-model"


class InvalidApiKey(KvxferError):
    """The request has no API key, or one that the router does not know."""

    code = "invalid-api-key"


class TooManyWrongKeys(KvxferError):
    """An address sends API keys that the router does not know, too fast."""

    code = "too-many-wrong-keys"

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Overloaded(KvxferError):
    """The router has as many requests under way as it may."""

    code = "overloaded"


class InvalidRequest(InvalidArgument):
    """A member of the body, `param`, cannot be meant."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


_STATUS: Final[dict[type[KvxferError], int]] = {
    InvalidArgument: 400,
    PromptTooLong: 400,
    InvalidApiKey: 401,
    UnknownModel: 404,
    BodyTooLarge: 413,
    TooManyWrongKeys: 429,
    NoCapacity: 503,
    ControlPlaneUnavailable: 503,
    RateLimited: 503,
    Overloaded: 503,
    BlockPoolExhausted: 503,
    LeaseExpired: 504,
    DeadlineExceeded: 504,
}
# The words of OpenAI's own API, where it has one for the case.
_CODES: Final[dict[type[KvxferError], str]] = {
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    InvalidApiKey: "invalid_api_key",
    TooManyWrongKeys: "rate_limit_exceeded",
}


def status_of(error: KvxferError) -> int:
    return next((_STATUS[base] for base in type(error).__mro__ if base in _STATUS), 502)


def error_object(error: KvxferError) -> dict[str, Any]:
    """The `error` of an answer, or of an event in a stream."""
    status = status_of(error)
    message = str(error)
    if isinstance(error, NoCapacity) and (reasons := error.details.get("reasons")):
        message += f": {'; '.join(map(str, cast(list[str], reasons)))}"
    if isinstance(error, Unauthenticated | Forbidden):
        message = f"the control plane does not let this router in: {message}"
    param = "model" if isinstance(error, UnknownModel) else getattr(error, "param", None)
    return {
        "message": message,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": param,
        "code": _CODES.get(type(error), error.code),
    }


def install(app: FastAPI) -> None:
    """Makes every error of the application one of OpenAI's shape."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(_request: Request, raised: Exception) -> JSONResponse:
        error = cast(KvxferError, raised)
        status = status_of(error)
        headers: dict[str, str] = {}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            details = error.details if isinstance(error, ControlPlaneError) else {}
            seconds = details.get("retry_after_seconds", RETRY_AFTER_SECONDS)
            headers["Retry-After"] = str(math.ceil(cast(float, seconds)))
        elif isinstance(error, TooManyWrongKeys):
            headers["Retry-After"] = str(math.ceil(error.retry_after_seconds))
        elif isinstance(error, InvalidApiKey):
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse({"error": error_object(error)}, status, headers)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, raised: Exception) -> JSONResponse:
        error = cast(HTTPException, raised)
        code = "not-found"
        message = f"there is no {request.url.path} here; see /v1/completions, /v1/chat/completions"
        if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            code = BodyTooLarge.code
            message = str(error.detail)
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            code = "method-not-allowed"
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{request.method} is not what {request.url.path} takes; use {allowed}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return JSONResponse({"error": body}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> JSONResponse:
        # This answer is made outside of all middleware.
        request_id = request.scope.get(REQUEST_ID_KEY, "")
        _log.error("%s failed", request.url.path, exc_info=error, extra={"request_id": request_id})
        body = {
            "message": "the router failed at this request; its log says why",
            "type": "server_error",
            "param": None,
            "code": "internal-error",
        }
        return JSONResponse({"error": body}, 500, {REQUEST_ID_HEADER: request_id})
