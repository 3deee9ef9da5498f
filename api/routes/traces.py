"""The intake of spans from OpenTelemetry exporters, and the trace of a request."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Request, Response

from kvxfer.api import refusals
from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import InvalidArgument, NotBuilt, UnknownTrace
from kvxfer.traces import Trace
from kvxfer.tracing.otlp import read_spans
from kvxfer.tracing.setup import is_installed
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/traces", tags=["traces"])

_PROTOBUF: Final = "application/x-protobuf"
_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "description": "An ExportTraceServiceRequest of OTLP 1; `Content-Encoding` may be gzip.",
        "content": {_PROTOBUF: {"schema": {"type": "string", "format": "binary"}}},
    }
}


@router.post(
    "",
    summary="Export spans",
    response_class=Response,
    responses={
        200: {"content": {_PROTOBUF: {"schema": {"type": "string", "format": "binary"}}}},
        **responses(InvalidArgument, NotBuilt),
    },
    openapi_extra=_BODY,
)
@allow(Scope.WORKER, Scope.ROUTER)
async def export(request: Request, app: ControlPlaneDep) -> Response:
    """Takes spans as an OTLP/HTTP collector does; the latest of them are kept in memory.

    Name this control plane in OTEL_EXPORTER_OTLP_ENDPOINT, or let a collector forward to it.
    """
    if not is_installed():
        raise refusals.takes_no_traces()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != _PROTOBUF:
        raise InvalidArgument(
            f"Content-Type is {media_type!r}; send {_PROTOBUF}, which is "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    app.traces.add(read_spans(await request.body(), encoding))
    return Response(b"", media_type=_PROTOBUF)


@router.get("/{request_id}", summary="Get", responses=responses(InvalidArgument, UnknownTrace))
@allow(Scope.ADMIN)
async def get(
    request_id: Annotated[str, Path(max_length=256, description="Id of a request or of a trace.")],
    app: ControlPlaneDep,
) -> Trace:
    """Returns the spans of a request that this replica has received, ordered by start."""
    return app.traces.find(request_id)
