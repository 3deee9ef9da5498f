"""The current activity of the fleet: one overview, or a stream of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query
from fastapi.responses import StreamingResponse

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlane, ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import ControlPlaneUnavailable, InvalidArgument
from kvxfer.instances import InstanceId, InstanceState, LiveState, Role
from kvxfer.overview import Overview, OverviewQuery
from kvxfer.record_schema import parameter
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/overview", tags=["overview"])

_SECONDS: Final = 1.0
_RETRY_MS: Final = 1000

_Label = Annotated[
    str | None,
    Query(max_length=256, description="Instances with this label; empty: without the label."),
]


async def _query(
    instance_id: Annotated[InstanceId | None, Query(**parameter(InstanceId))] = None,
    model: Annotated[str | None, Query(max_length=256)] = None,
    role: Annotated[Role | None, Query(description="Instances of exactly this role.")] = None,
    state: LiveState | None = None,
    zone: _Label = None,
    rack: _Label = None,
    host: _Label = None,
    search: Annotated[
        str | None, Query(max_length=128, description="A part of the id; case is ignored.")
    ] = None,
    offset: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    limit: Annotated[int, Query(ge=0, le=200, description="The most instances listed.")] = 50,
) -> OverviewQuery:
    return OverviewQuery(
        instance_id=instance_id,
        model=model,
        role=role,
        state=None if state is None else InstanceState(state),
        zone=zone,
        rack=rack,
        host=host,
        search=search,
        offset=offset,
        limit=limit,
    )


_QueryDep = Annotated[OverviewQuery, Depends(_query)]


@router.get(
    "",
    summary="Look",
    responses=responses(InvalidArgument, ControlPlaneUnavailable),
)
@allow(Scope.MONITOR, Scope.ADMIN)
async def look(app: ControlPlaneDep, query: _QueryDep) -> Overview:
    """Returns the fleet in one bounded answer: counts by role and place, traffic, the newest
    transfers, a page of instances, and the autoscaler's decisions.

    In a large fleet it may be a moment old: after each overview the control plane pauses for 9
    times its CPU time, at most 2 s.
    """
    return await app.overviews.look(query)


@router.get(
    "/watch",
    summary="Watch",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "Events `overview` (data: Overview), one per second",
            "content": {
                "text/event-stream": {
                    "schema": {"type": "string"},
                    "example": 'event: overview\ndata: {"at":1795046460.0,…}\n\n',
                }
            },
        },
        **responses(InvalidArgument, ControlPlaneUnavailable),
    },
)
@allow(Scope.MONITOR, Scope.ADMIN)
async def watch(app: ControlPlaneDep, query: _QueryDep) -> StreamingResponse:
    """Sends overviews as server-sent events. Each is complete: a reader that reconnects misses
    nothing."""
    first = await app.overviews.look(query)
    return StreamingResponse(
        _events(app, query, first),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _events(app: ControlPlane, query: OverviewQuery, first: Overview) -> AsyncIterator[bytes]:
    stopping = asyncio.ensure_future(app.stopping.wait())
    app.metrics.watchers.inc()
    try:
        yield b"retry: %d\n\n" % _RETRY_MS
        overview = first
        while True:
            yield b"event: overview\ndata: %s\n\n" % msgspec.json.encode(overview)
            done, _ = await asyncio.wait((stopping,), timeout=_SECONDS)
            if done:
                return
            overview = await app.overviews.look(query)
    finally:
        stopping.cancel()
        app.metrics.watchers.dec()
