"""The autoscaler's plan, for operators."""

from __future__ import annotations

from fastapi import APIRouter

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import ControlPlaneUnavailable, ScalingFailed
from kvxfer.scaling import ScalePlan
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/scale", tags=["scaling"])


@router.get("/plan", summary="Plan", responses=responses(ScalingFailed, ControlPlaneUnavailable))
@allow(Scope.ADMIN)
async def plan(app: ControlPlaneDep) -> ScalePlan:
    """Returns what the autoscaler would do now, with each rule and bound that applied, as a dry
    run."""
    return await app.autoscaler.plan()
