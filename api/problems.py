"""Every error as a problem document (RFC 9457), in answers and in the OpenAPI schema."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from kvxfer.api.context import control_plane
from kvxfer.api.examples import EXAMPLES
from kvxfer.api.refusals import invalid
from kvxfer.errors import (
    BodyTooLarge,
    Forbidden,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    NoCapacity,
    RateLimited,
    Unauthenticated,
)
from kvxfer.web.answer import ClientLeft
from kvxfer.web.request_log import REQUEST_ID_HEADER, REQUEST_ID_KEY

MEDIA_TYPE: Final = "application/problem+json"

# Errors whose problem documents have a separate model.
_MODEL: Final[dict[type[KvxferError], str]] = {LayoutMismatch: "LayoutMismatchProblem"}
_log = logging.getLogger("kvxfer.api")


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Makes every error of the application with these routers a problem document."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(request: Request, error: Exception) -> Response:
        return answer_error(request, cast(KvxferError, error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> Response:
        return answer_error(request, invalid(cast(RequestValidationError, error)))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: Exception) -> Response:
        return _answer_http(request, cast(HTTPException, error), routers)

    @app.exception_handler(Exception)
    async def _internal(request: Request, error: Exception) -> Response:
        # No middleware sees this answer.
        request_id = request.scope.get(REQUEST_ID_KEY, "")
        _log.error(
            "%s %s failed",
            request.method,
            request.url.path,
            exc_info=error,
            extra={"request_id": request_id},
        )
        detail = "the control plane failed at this request; its log says why"
        headers = {REQUEST_ID_HEADER: request_id}
        return _answer(request, 500, "internal-error", detail, headers=headers)


def responses(*errors: type[KvxferError]) -> dict[int | str, dict[str, Any]]:
    """Returns the `responses=` of a route that can raise these errors, each with an example."""
    by_status: dict[int, list[type[KvxferError]]] = {}
    for error in sorted(errors, key=lambda error: (error.status, error.code)):
        by_status.setdefault(error.status, []).append(error)
    return {status: _response(group) for status, group in by_status.items()}


def _response(errors: Sequence[type[KvxferError]]) -> dict[str, Any]:
    models = dict.fromkeys(_MODEL.get(error, "Problem") for error in errors)
    schemas = [{"$ref": f"#/components/schemas/{model}"} for model in models]
    return {
        "description": " or ".join(error.code for error in errors),
        "content": {
            MEDIA_TYPE: {
                "schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas},
                "examples": {error.code: {"value": _example(error)} for error in errors},
            }
        },
    }


def _example(error: type[KvxferError]) -> dict[str, object]:
    shown = EXAMPLES[error]
    return {**_members(shown.status, shown.code, str(shown), "/v1/…"), **shown.details}


def _members(status: int, code: str, detail: str, instance: str) -> dict[str, object]:
    return {
        "type": f"urn:kvxfer:error:{code}",
        "title": code.replace("-", " ").capitalize(),
        "status": status,
        "detail": detail,
        "code": code,
        "instance": instance,
    }


def _answer(
    request: Request,
    status: int,
    code: str,
    detail: str,
    *,
    members: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    control_plane(request).metrics.errors.labels(code).inc()
    body = _members(status, code, detail, request.url.path)
    if request_id := request.scope.get(REQUEST_ID_KEY):
        body["request_id"] = request_id
    # A member of the error never takes the place of one that RFC 9457 defines.
    body.update({name: value for name, value in (members or {}).items() if name not in body})
    # ASCII: a member's name that the request made up may not be valid in UTF-8.
    return Response(json.dumps(body), status, dict(headers or {}), media_type=MEDIA_TYPE)


def answer_error(request: Request, error: KvxferError) -> Response:
    """Returns the problem document of an error."""
    return _answer(
        request,
        error.status,
        error.code,
        str(error),
        members=error.details,
        headers=_headers(error),
    )


# The value of the Retry-After header of a 503.
_RETRY_AFTER_SECONDS: Final = 1


def _headers(error: KvxferError) -> dict[str, str]:
    match error:
        case Unauthenticated(details={"invalid_token": True}):
            return {"WWW-Authenticate": 'Bearer realm="kvxfer", error="invalid_token"'}
        case Unauthenticated():
            return {"WWW-Authenticate": 'Bearer realm="kvxfer"'}
        case Forbidden(details={"scopes": [*scopes]}):
            wanted = " ".join(map(str, scopes))
            return {"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{wanted}"'}
        case (
            RateLimited(details={"retry_after_seconds": float(seconds)})
            | NoCapacity(details={"retry_after_seconds": float(seconds)})
        ):
            return {"Retry-After": str(math.ceil(seconds))}
    if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(_RETRY_AFTER_SECONDS)}
    return {}


def _answer_http(request: Request, error: HTTPException, routers: Sequence[APIRouter]) -> Response:
    if isinstance(error, ClientLeft):
        return Response(status_code=error.status_code)
    status = HTTPStatus(error.status_code)
    code = status.phrase.lower().replace(" ", "-")
    detail, headers = str(error.detail), dict(error.headers or {})
    if status is HTTPStatus.NOT_FOUND:
        detail = f"there is no {request.url.path} here; /docs lists the routes"
    elif status is HTTPStatus.BAD_REQUEST:
        # FastAPI could not decode the body; broken JSON in UTF-8 is a validation error instead.
        status, code = HTTPStatus.UNPROCESSABLE_ENTITY, InvalidArgument.code
        detail = "the body is no JSON text in UTF-8"
    elif status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        code = BodyTooLarge.code
    elif status is HTTPStatus.METHOD_NOT_ALLOWED:
        # Starlette names the methods of one route only; a path may have several.
        allowed = headers["Allow"] = ", ".join(_methods(request.url.path, routers))
        detail = f"{request.url.path} does not take {request.method}; use {allowed}"
    return _answer(request, status.value, code, detail, headers=headers)


def _methods(path: str, routers: Sequence[APIRouter]) -> list[str]:
    routes = (route for router in routers for route in router.routes)
    return sorted(
        method
        for route in routes
        if isinstance(route, APIRoute) and route.path_regex.match(path)
        for method in route.methods or ()
    )
