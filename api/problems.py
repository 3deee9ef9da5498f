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
from kvxfer.errors import (
    BlockTableExists,
    BlockTableMismatch,
    BodyTooLarge,
    ControlPlaneError,
    ControlPlaneUnavailable,
    Forbidden,
    InstanceExists,
    InstanceLeaving,
    InvalidArgument,
    KvxferError,
    LayoutMismatch,
    NoCapacity,
    NotAggregating,
    NotBuilt,
    OldVersion,
    PromptTooLong,
    RateLimited,
    ScalingFailed,
    ScorerFailed,
    StaleEpoch,
    TicketExpired,
    TicketInvalid,
    TransferExists,
    Unauthenticated,
    UnknownBlockTable,
    UnknownInstance,
    UnknownTrace,
    UnknownTransfer,
    UnknownWeightUpdate,
    WeightUpdateDecided,
    WeightUpdateExists,
)
from kvxfer.web.answer import ClientLeft
from kvxfer.web.request_log import REQUEST_ID_HEADER, REQUEST_ID_KEY

MEDIA_TYPE: Final = "application/problem+json"

_STATUS: Final[dict[type[KvxferError], int]] = {
    InvalidArgument: 422,
    PromptTooLong: 422,
    LayoutMismatch: 409,
    InstanceExists: 409,
    InstanceLeaving: 409,
    StaleEpoch: 409,
    UnknownInstance: 404,
    UnknownTransfer: 404,
    UnknownBlockTable: 404,
    UnknownTrace: 404,
    UnknownWeightUpdate: 404,
    WeightUpdateExists: 409,
    WeightUpdateDecided: 409,
    OldVersion: 409,
    TransferExists: 409,
    BlockTableExists: 409,
    BlockTableMismatch: 409,
    TicketInvalid: 403,
    Unauthenticated: 401,
    Forbidden: 403,
    BodyTooLarge: 413,
    RateLimited: 429,
    NotAggregating: 501,
    NoCapacity: 503,
    ControlPlaneUnavailable: 503,
    ScalingFailed: 502,
    ScorerFailed: 500,
    NotBuilt: 501,
}
# Errors whose problem documents have a separate model.
_MODEL: Final[dict[type[KvxferError], str]] = {LayoutMismatch: "LayoutMismatchProblem"}
# Members of an error that documentation can show; answers carry the real ones.
_EXAMPLE_MEMBERS: Final[dict[type[KvxferError], dict[str, object]]] = {
    InvalidArgument: {
        "detail": "num_blocks: Input should be greater than or equal to 1",
        "field": "num_blocks",
        "errors": [
            {
                "location": "body",
                "field": "num_blocks",
                "message": "Input should be greater than or equal to 1",
            }
        ],
    },
    PromptTooLong: {
        "detail": "a prompt of 90000 tokens takes 5625 KV blocks, but the largest ready decode "
        "instance, 'decode-0', has 4096; shorten the prompt or give the instances more blocks"
    },
    LayoutMismatch: {
        "detail": str(LayoutMismatch("head_size", 128, 64)),
        "field": "head_size",
        "prefill": 128,
        "decode": 64,
    },
    InstanceExists: {
        "detail": "two instances have the instance_id 'prefill-0': one is alive at "
        "http://10.0.0.5:8000 (epoch 1795046400000001), the other registers from "
        "http://10.0.0.6:8000; leave instance_id out, or make it unique for each replica. An "
        "instance that replaces another is accepted when the earlier lease ends, in 4.2 s without "
        "a heartbeat",
        "instance_id": "prefill-0",
        "epoch": 1795046400000001,
        "lease_remaining_seconds": 4.2,
    },
    InstanceLeaving: {
        "detail": "the worker of instance 'prefill-0' has begun to leave, so its drain cannot be "
        "undone; start it again when it has left",
        "instance_id": "prefill-0",
    },
    StaleEpoch: {
        "detail": "instance 'prefill-0' has no lease under epoch 1795046400000001; register again",
        "instance_id": "prefill-0",
        "epoch": 1795046400000001,
    },
    UnknownInstance: {
        "detail": "no instance 'prefill-0' is registered: it never was, it left, or its lease "
        "expired",
        "instance_id": "prefill-0",
    },
    UnknownTransfer: {
        "detail": "no transfer '3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a' is open: it was released, it "
        "expired, or one of its instances is gone",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    },
    UnknownBlockTable: {
        "detail": "transfer '3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a' has no block table yet; ask again, "
        "with wait_seconds to be answered as soon as it has",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    },
    UnknownTrace: {
        "detail": "there is no trace of 'chat-7f3a': it was not recorded, has not arrived yet, "
        "went to another replica, or is too old",
        "request_id": "chat-7f3a",
    },
    UnknownWeightUpdate: {
        "detail": "no weight update '7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d' is known: it was not "
        "announced here, or it ended long ago",
        "update_id": "7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d",
    },
    WeightUpdateExists: {
        "detail": "update '7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d' of model 'llama-3.2-3b' to version 7 "
        "is staging; wait for its end, or decide to abort it",
        "update_id": "7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d",
        "model": "llama-3.2-3b",
        "version": 7,
    },
    WeightUpdateDecided: {
        "detail": "weight update '7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d' cannot be committed: it was "
        "decided to abort it",
        "update_id": "7c1e0b6a52d84f3f9a6d2c1b0e9f8a7d",
        "model": "llama-3.2-3b",
        "version": 7,
        "decision": "abort",
    },
    OldVersion: {
        "detail": "instance 'decode-0' of model 'llama-3.2-3b' serves weights version 7; announce "
        "a greater one than that, not 7",
        "instance_id": "decode-0",
        "version": 7,
        "served": 7,
    },
    NotBuilt: {
        "detail": "this control plane takes no traces: OpenTelemetry is not installed there; "
        "pip install 'kvxfer[otel]'",
    },
    TransferExists: {
        "detail": "transfer '3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a' is open for another request "
        "('cmpl-7', 1900 prompt tokens of model 'llama-3.2-3b'); take a new transfer_id",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    },
    BlockTableExists: {
        "detail": "transfer '3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a' has another block table already; a "
        "transfer takes one, open a new one",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    },
    BlockTableMismatch: {
        "detail": "the block table is of transfer '5b1c…', and was sent for "
        "'3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a'",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    },
    TicketInvalid: {
        "detail": "the block table of transfer 3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a cannot be trusted "
        "(its signature does not fit); pass it on as decode made it"
    },
    TicketExpired: {
        "detail": "the ticket of transfer 3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a expired 0.4 s ago; send "
        "the request again for a new one"
    },
    NoCapacity: {
        "detail": "no pair of instances can take the request now; retry, or add what the reasons "
        "name",
        "reasons": ["no decode instance of model 'llama-3.2-3b' is ready (1 draining)"],
    },
    NotAggregating: {
        "detail": "no instance of model 'llama-3.2-3b' serves requests alone; send one that a pair "
        "can serve, or start an instance of vLLM"
    },
    ControlPlaneUnavailable: {"detail": "the control plane is stopping; retry with another one"},
    Unauthenticated: {
        "detail": "the control plane does not know this token; ask its operator for a new one"
    },
    Forbidden: {
        "detail": "POST /v1/transfers takes a token with scope router; that of 'node-5' has worker",
        "scopes": ["router"],
    },
    RateLimited: {
        "detail": "too many requests from 'router-1' at 10.0.0.9; retry in 0.012 s",
        "retry_after_seconds": 0.012,
    },
    BodyTooLarge: {"detail": "the body is larger than the limit of 1048576 bytes"},
    ScorerFailed: {
        "detail": "the scorer Fewest cannot weigh a pair of distance 4, with 0 fabric steps and 0 "
        "cached tokens (the cost is nan); correct the scorer, or take another one in "
        "--pairing-policy"
    },
    ScalingFailed: {
        "detail": "Kubernetes did not read deployments.apps llm/prefill: HTTP 403 Forbidden; give "
        "the service account get and update on its /scale"
    },
}

_log = logging.getLogger("kvxfer.api")


def install(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Makes every error of the application with these routers a problem document."""

    @app.exception_handler(KvxferError)
    async def _kvxfer_error(request: Request, error: Exception) -> Response:
        return answer_error(request, cast(KvxferError, error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: Exception) -> Response:
        return _answer_invalid(request, cast(RequestValidationError, error))

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
    for error in sorted(errors, key=lambda error: (_status(error), error.code)):
        by_status.setdefault(_status(error), []).append(error)
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


def _status(error: type[KvxferError]) -> int:
    return next((_STATUS[base] for base in error.__mro__ if base in _STATUS), 500)


def _example(error: type[KvxferError]) -> dict[str, object]:
    return {**_members(_status(error), error.code, "", "/v1/…"), **_EXAMPLE_MEMBERS[error]}


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
    status = _status(type(error))
    members: dict[str, object] = {}
    if isinstance(error, ControlPlaneError):
        members = error.details
    elif isinstance(error, LayoutMismatch):
        members = {"field": error.field, "prefill": error.prefill, "decode": error.decode}
    headers = _headers(error, status)
    return _answer(request, status, error.code, str(error), members=members, headers=headers)


# The value of the Retry-After header of a 503.
_RETRY_AFTER_SECONDS: Final = 1


def _headers(error: KvxferError, status: int) -> dict[str, str]:
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
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"Retry-After": str(_RETRY_AFTER_SECONDS)}
    return {}


def _answer_invalid(request: Request, error: RequestValidationError) -> Response:
    errors = [_invalid_member(item) for item in error.errors()]
    first = errors[0]
    detail = f"{first['field']}: {first['message']}" if first["field"] else first["message"]
    if len(errors) > 1:
        detail += f" (and {len(errors) - 1} more, see errors)"
    return _answer(
        request,
        422,
        InvalidArgument.code,
        detail,
        members={"field": first["field"], "errors": errors},
    )


def _invalid_member(item: Mapping[str, Any]) -> dict[str, str]:
    location, *path = cast(Sequence[str | int], item["loc"])
    if item["type"] == "json_invalid":
        cause = item.get("ctx", {}).get("error", "")
        return {
            "location": "body",
            "field": "",
            "message": f"the body is not JSON: {cause} at character {path[0] if path else 0}",
        }
    return {
        "location": str(location),
        "field": ".".join(str(part) for part in path),
        "message": str(item["msg"]).removeprefix("Value error, "),
    }


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
