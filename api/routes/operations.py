"""The routes for an operator's tools: alive, ready, metrics."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from kvxfer.api.access import GuardedRoute, allow, public
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.metrics import CONTENT_TYPE
from kvxfer.api.problems import responses
from kvxfer.errors import ControlPlaneUnavailable
from kvxfer.scheduler import refusals
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, tags=["operations"])


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    status: Literal["ok", "stale"] = Field(
        description="`stale`: the registry is unavailable; reads return what was last known, "
        "writes get 503."
    )


@router.get("/healthz", summary="Alive")
@public
async def healthz() -> Health:
    """Answers as long as the process runs."""
    return Health()


@router.get("/readyz", summary="Ready", responses=responses(ControlPlaneUnavailable))
@public
async def readyz(app: ControlPlaneDep) -> Readiness:
    """Answers 503 if the process is stopping, or has never reached its registry.

    A registry that becomes unavailable later makes it `stale`, not unready: all replicas share the
    registry, and none would be left to answer reads.
    """
    if app.stopping.is_set():
        raise refusals.stopping()
    await app.registry.ping()
    return Readiness(status="ok" if app.registry.stale_seconds is None else "stale")


@router.get(
    "/metrics",
    summary="Metrics",
    response_class=PlainTextResponse,
    responses=responses(ControlPlaneUnavailable),
)
@allow(Scope.MONITOR, Scope.ADMIN)
async def metrics(app: ControlPlaneDep) -> Response:
    """Returns metrics in the Prometheus text format."""
    exposition = app.metrics.render(
        await app.registry.statistics(),
        await app.registry.instances(),
        app.registry.stale_seconds,
        app.admission.waiting,
    )
    return Response(exposition, media_type=CONTENT_TYPE)
