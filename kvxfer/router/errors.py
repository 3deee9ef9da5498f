"""Errors in the format of OpenAI's API: a status, and one object that says what is wrong. Errors
of workers are passed on unchanged."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvxfer.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidApiKey,
    KvxferError,
    NoCapacity,
    PromptTooLong,
    TooManyWrongKeys,
    Unauthenticated,
    UnknownModel,
    WorkerError,
)
from kvxfer.router.dialects import COMPLETIONS, MESSAGES
from kvxfer.unreadable import UNREADABLE
from kvxfer.web.request_log import REQUEST_ID_HEADER, REQUEST_ID_KEY

_log = logging.getLogger("kvxfer.router")

RETRY_AFTER_SECONDS: Final = 1.0


class StreamLost(Exception):
    """A stream broke off with `error`, and does not go on at another worker.

    `because` says why, and `param` names the member that prevents it. Both are empty if the router
    continues no streams.
    """

    def __init__(self, error: KvxferError, because: str = "", param: str | None = None) -> None:
        super().__init__(str(error))
        self.error, self.because, self.param = error, because, param

    def error_object(self) -> dict[str, Any]:
        """Returns the `error` of the stream's last event."""
        told = error_object(self.error)
        if self.because:
            told["message"] += f"; the stream does not go on at another worker {self.because}"
            told["param"] = self.param
        return told


# Codes of OpenAI's own API.
_CODES: Final[dict[type[KvxferError], str]] = {
    PromptTooLong: "context_length_exceeded",
    UnknownModel: "model_not_found",
    InvalidApiKey: "invalid_api_key",
    TooManyWrongKeys: "rate_limit_exceeded",
}


def error_object(error: KvxferError) -> dict[str, Any]:
    """Returns the `error` of an answer, or of an event in a stream."""
    message = str(error)
    if isinstance(error, WorkerError) and (told := told_by(error.content)) is not None:
        return told
    if isinstance(error, NoCapacity) and (reasons := error.details.get("reasons")):
        message += f": {'; '.join(map(str, cast(list[str], reasons)))}"
    if isinstance(error, Unauthenticated | Forbidden):
        message = f"the control plane refuses this router: {message}"
    param = cast(str | None, error.details.get("param"))
    return _object(message, error.router_status, _CODES.get(type(error), error.code), param)


def told_by(content: bytes) -> dict[str, Any] | None:
    """Returns the error object in a worker's answer, nested as in OpenAI's API (vLLM) or flat
    (SGLang); None if there is none."""
    try:
        answer = msgspec.json.decode(content, type=dict[str, Any])
    except UNREADABLE:
        return None
    error = answer.get("error", answer)
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return None
    return {name: error.get(name) for name in ("message", "type", "param", "code")}


def _object(message: str, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


def install(app: FastAPI) -> None:
    """Gives every error of the application the format of OpenAI's API."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(request: Request, raised: Exception) -> Response:
        error = cast(KvxferError, raised)
        if isinstance(error, WorkerError):
            return Response(error.content, error.status, error.headers)
        status = error.router_status
        headers: dict[str, str] = {}
        if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            seconds = error.details.get("retry_after_seconds", RETRY_AFTER_SECONDS)
            headers["Retry-After"] = str(math.ceil(cast(float, seconds)))
        elif isinstance(error, InvalidApiKey):
            headers["WWW-Authenticate"] = "Bearer"
        return _answer(request, error_object(error), status, headers)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, raised: Exception) -> Response:
        error = cast(HTTPException, raised)
        code = "not-found"
        message = f"there is no {request.url.path} here; see docs/router.md"
        if error.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            code = BodyTooLarge.code
            message = str(error.detail)
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            code = "method-not-allowed"
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{request.url.path} does not take {request.method}; use {allowed}"
        told = _object(message, error.status_code, code)
        return _answer(request, told, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> Response:
        # No middleware sees this answer.
        request_id = request.scope.get(REQUEST_ID_KEY, "")
        _log.error("%s failed", request.url.path, exc_info=error, extra={"request_id": request_id})
        told = _object("the router failed at this request; its log says why", 500, "internal-error")
        return _answer(request, told, 500, {REQUEST_ID_HEADER: request_id})


def _answer(
    request: Request, error: dict[str, Any], status: int, headers: Mapping[str, str] | None
) -> Response:
    """Returns an error in the format of the route's API."""
    of_messages = request.url.path.startswith(MESSAGES.path)
    return JSONResponse(
        (MESSAGES if of_messages else COMPLETIONS).error_body(error), status, headers
    )
