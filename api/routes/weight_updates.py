"""A training job tells of the weights that it sends to inference instances."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response

from kvxfer.api import audit
from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    OldVersion,
    UnknownInstance,
    UnknownWeightUpdate,
    WeightUpdateDecided,
    WeightUpdateExists,
)
from kvxfer.record_schema import parameter
from kvxfer.web.tokens import Scope
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decided,
    DecideUpdate,
    ReportUpdate,
    UpdateId,
    WeightUpdate,
    WeightUpdateList,
)

router = APIRouter(route_class=GuardedRoute, prefix="/v1/weights/updates", tags=["weights"])
_UpdateId = Annotated[UpdateId, Path(**parameter(UpdateId))]


@router.post(
    "",
    status_code=201,
    summary="Announce",
    responses=responses(
        InvalidArgument, UnknownInstance, OldVersion, WeightUpdateExists, ControlPlaneUnavailable
    ),
)
@allow(Scope.WORKER, Scope.ADMIN)
async def announce(
    body: Annotated[AnnounceUpdate, Body()], app: ControlPlaneDep, response: Response
) -> WeightUpdate:
    """Begins an update under a lease, which each report of its coordinator renews.

    A model has one update under way at a time. Where the lease ends, so does the update: as aborted
    if nothing is decided.
    """
    step = await app.registry.announce_update(body, seconds=app.settings.weight_update_seconds)
    response.headers["Location"] = f"{router.prefix}/{step.after.update_id}"
    return step.after


@router.get("", summary="List", responses=responses(InvalidArgument, ControlPlaneUnavailable))
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def list_updates(
    app: ControlPlaneDep, model: Annotated[str | None, Query(max_length=256)] = None
) -> WeightUpdateList:
    """The updates under way and the last 100 that have ended, the newest first."""
    updates = await app.registry.updates(model)
    return WeightUpdateList(updates=updates, stale_seconds=app.registry.stale_seconds)


@router.get(
    "/{update_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownWeightUpdate, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def get(update_id: _UpdateId, app: ControlPlaneDep) -> WeightUpdate:
    return await app.registry.update(update_id)


@router.patch(
    "/{update_id}",
    summary="Report",
    responses=responses(
        InvalidArgument, UnknownWeightUpdate, WeightUpdateDecided, ControlPlaneUnavailable
    ),
)
@allow(Scope.WORKER, Scope.ADMIN)
async def report(
    update_id: _UpdateId, body: Annotated[ReportUpdate, Body()], app: ControlPlaneDep
) -> WeightUpdate:
    """Renews the lease and takes news of the update; it may be sent again.

    News of instances are also taken after the update has ended.
    """
    step = await app.registry.report_update(update_id, body)
    app.metrics.note_update(step)
    return step.after


@router.post(
    "/{update_id}/decision",
    summary="Decide",
    responses=responses(InvalidArgument, UnknownWeightUpdate, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ADMIN)
async def decide(
    update_id: _UpdateId,
    body: Annotated[DecideUpdate, Body()],
    request: Request,
    app: ControlPlaneDep,
) -> Decided:
    """Decides about the update, where nothing is decided yet. The answer is the first decision.

    An instance that has staged an update and lost its coordinator asks for `abort`: it hears
    `commit` if that was decided before, and no coordinator can decide it afterwards.
    """
    step = await app.registry.decide_update(update_id, body.decision)
    app.metrics.note_update(step)
    update = step.after
    decision = update.decision or body.decision
    if step.before is None or step.before.decision is None:  # the first decision, which holds
        about = {"model": update.model, "version": update.version, "decision": decision.value}
        audit.note(request, "decide weight update", update_id=update_id, **about)
    return Decided(update_id=update_id, version=update.version, decision=decision)
