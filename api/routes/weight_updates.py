"""A training job's reports of the weights that it sends to inference instances."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response

from kvxfer.api import audit
from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlane, ControlPlaneDep
from kvxfer.api.instance_secrets import InstanceSecret, digest, has_any
from kvxfer.api.problems import responses
from kvxfer.errors import (
    ControlPlaneUnavailable,
    Forbidden,
    InvalidArgument,
    OldVersion,
    UnknownInstance,
    UnknownWeightUpdate,
    WeightUpdateDecided,
    WeightUpdateExists,
)
from kvxfer.instances import InstanceId
from kvxfer.record_schema import parameter
from kvxfer.web.tokens import Scope
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decided,
    DecideUpdate,
    Decision,
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
@allow(Scope.WORKER, Scope.TRAINER, Scope.ADMIN)
async def announce(
    body: Annotated[AnnounceUpdate, Body()],
    request: Request,
    app: ControlPlaneDep,
    response: Response,
) -> WeightUpdate:
    """Begins an update under a lease, which each report of its coordinator renews.

    A model has one update under way at a time. When the lease ends, so does the update: as aborted
    if nothing is decided.
    """
    if not _may_lead(request):
        named = set(body.instances)
        live = await app.registry.instances()
        of_model = (each.instance_id for each in live if each.model == body.model)
        await _require_worker_of_before(request, app, named or of_model)
    step = await app.registry.announce_update(body, seconds=app.settings.weight_update_seconds)
    response.headers["Location"] = f"{router.prefix}/{step.after.update_id}"
    return step.after


@router.get("", summary="List", responses=responses(InvalidArgument, ControlPlaneUnavailable))
@allow(Scope.WORKER, Scope.ROUTER, Scope.TRAINER, Scope.ADMIN)
async def list_updates(
    app: ControlPlaneDep, model: Annotated[str | None, Query(max_length=256)] = None
) -> WeightUpdateList:
    """Lists the updates under way and the last 100 that have ended, the newest first."""
    updates = await app.registry.updates(model)
    return WeightUpdateList(updates=updates, stale_seconds=app.registry.stale_seconds)


@router.get(
    "/{update_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownWeightUpdate, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.TRAINER, Scope.ADMIN)
async def get(update_id: _UpdateId, app: ControlPlaneDep) -> WeightUpdate:
    return await app.registry.update(update_id)


@router.patch(
    "/{update_id}",
    summary="Report",
    responses=responses(
        InvalidArgument, UnknownWeightUpdate, WeightUpdateDecided, ControlPlaneUnavailable
    ),
)
@allow(Scope.WORKER, Scope.TRAINER, Scope.ADMIN)
async def report(
    update_id: _UpdateId,
    body: Annotated[ReportUpdate, Body()],
    request: Request,
    app: ControlPlaneDep,
) -> WeightUpdate:
    """Renews the lease and takes news of the update; a report may be sent again.

    News of instances are also taken after the update has ended.
    """
    if not _may_lead(request):
        await _require_worker_of_before(request, app, await _members(app, update_id))
    step = await app.registry.report_update(update_id, body)
    app.metrics.note_update(step)
    return step.after


@router.post(
    "/{update_id}/decision",
    summary="Decide",
    responses=responses(InvalidArgument, UnknownWeightUpdate, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.TRAINER, Scope.ADMIN)
async def decide(
    update_id: _UpdateId,
    body: Annotated[DecideUpdate, Body()],
    request: Request,
    app: ControlPlaneDep,
    instance_id: Annotated[
        InstanceId | None,
        Query(**{**parameter(InstanceId), "description": "The instance that asks for `abort`."}),
    ] = None,
    secret: InstanceSecret = None,
) -> Decided:
    """Decides about the update, if nothing is decided yet. The answer is the first decision.

    An instance that has staged an update and lost its coordinator asks for `abort`. The answer is
    `commit` if that was decided before; otherwise no coordinator can decide it afterwards.
    """
    if not _may_lead(request):
        members = await _members(app, update_id)
        if instance_id in members and body.decision is Decision.ABORT:
            await app.registry.require_secret(instance_id, digest(secret))
        else:
            await _require_worker_of_before(request, app, members)
    step = await app.registry.decide_update(update_id, body.decision)
    app.metrics.note_update(step)
    update = step.after
    decision = update.decision or body.decision
    if step.before is None or step.before.decision is None:  # the first decision, which holds
        about = {"model": update.model, "version": update.version, "decision": decision.value}
        audit.note(request, "decide weight update", update_id=update_id, **about)
    return Decided(update_id=update_id, version=update.version, decision=decision)


def _may_lead(request: Request) -> bool:
    """Whether the caller may be the coordinator of updates."""
    return has_any(request, Scope.TRAINER, Scope.ADMIN)


async def _members(app: ControlPlane, update_id: str) -> set[str]:
    update = await app.registry.update(update_id)
    return {part.instance_id for part in update.instances}


async def _require_worker_of_before(
    request: Request, app: ControlPlane, members: Iterable[str]
) -> None:
    """Raises Forbidden if all members have secrets: a worker's token cannot lead their updates.
    Earlier workers, which have no secrets, and their training jobs had no other token."""
    names = set(members)
    live = await app.registry.instances()
    if all(each.has_secret for each in live if each.instance_id in names):
        raise Forbidden(
            f"{request.method} {request.url.path} takes a token with scope trainer; give one to "
            "the training job. A worker may only ask for abort, with its instance_id and secret",
            scopes=[Scope.TRAINER.value],
        )
