"""The registration of workers, from joining to leaving."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import Annotated, Final

from fastapi import APIRouter, Body, Path, Query, Request, Response
from msgspec.structs import asdict

from kvxfer.api import audit
from kvxfer.api.access import GuardedRoute, allow, is_operator
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.heartbeats import renew
from kvxfer.api.instance_secrets import InstanceSecret, asked_of, digest, new_secret
from kvxfer.api.pages import ETAG, LINK, Cursor, IfNoneMatch, answer, position, tag, take
from kvxfer.api.problems import responses
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InstanceExists,
    InstanceLeaving,
    InvalidArgument,
    StaleEpoch,
    UnknownInstance,
)
from kvxfer.instances import (
    DrainRequest,
    Epoch,
    Heartbeat,
    Instance,
    InstanceId,
    InstanceList,
    InstanceState,
    Lease,
    LiveState,
    PublishBlocks,
    PublishedBlocks,
    Registered,
    RegisterInstance,
    Role,
    RoleChange,
)
from kvxfer.record_schema import parameter
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/instances", tags=["instances"])
_InstanceId = Annotated[InstanceId, Path(**parameter(InstanceId))]
# A page of these is about 1 MB, which takes the event loop a few milliseconds.
_MOST_LISTED: Final = 1000
_DRAIN_DEFAULTS: Final = DrainRequest()


@router.post(
    "",
    status_code=201,
    summary="Register",
    responses=responses(InvalidArgument, InstanceExists, ControlPlaneUnavailable),
)
@allow(Scope.WORKER)
async def register(
    body: Annotated[RegisterInstance, Body()], app: ControlPlaneDep, response: Response
) -> Registered:
    """Begins a lease with a new epoch. Send heartbeats to keep it.

    With `takes_secret` the answer has a secret that each further call as this instance sends.
    """
    secret = new_secret() if body.takes_secret else None
    lease = await app.registry.register(
        body.spec,
        state=InstanceState(body.state),
        incarnation=body.incarnation,
        secret=digest(secret),
    )
    response.headers["Location"] = f"{router.prefix}/{lease.instance_id}"
    return Registered(**{**asdict(lease), "at": app.clock.unix()}, secret=secret)


@router.get(
    "",
    summary="List",
    response_model=InstanceList,
    responses={
        200: {"headers": {**LINK, **ETAG}},
        304: {"description": "The page has a tag of `If-None-Match`.", "headers": {**LINK, **ETAG}},
        **responses(InvalidArgument, ControlPlaneUnavailable),
    },
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def list_instances(
    request: Request,
    app: ControlPlaneDep,
    role: Annotated[
        Role | None, Query(description="Instances that serve this role; `both` serve either.")
    ] = None,
    model: Annotated[
        str | None,
        Query(description="Instances of this model, or that have this alias or adapter of it."),
    ] = None,
    state: Annotated[LiveState | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=_MOST_LISTED, description="The most per page.")] = (
        _MOST_LISTED
    ),
    cursor: Cursor = None,
    if_none_match: IfNoneMatch = None,  # noqa: ARG001 (read from the request)
) -> Response:
    """Lists the live instances, ordered by id, in pages.

    An instance that lives all the while is in exactly one page. The ETag changes when an instance
    joins or leaves, or when its state, role, epoch, models, weights version or drain deadline
    changes. It stays when only loads, reservations and heartbeat times change.
    """
    after = position(cursor, str) or ""
    live = await app.registry.instances()
    matching = (
        instance
        for instance in islice(live, bisect_right(live, after, key=_id), None)
        if (role is None or instance.role.serves(role))
        and instance.serves(model)
        and state in (None, instance.state)
    )
    listed, last = take(matching, limit, _id)
    page = InstanceList(instances=listed, stale_seconds=app.registry.stale_seconds)
    return answer(request, page, last=last, etag=tag(last, [_gist(each) for each in listed]))


def _id(instance: Instance) -> str:
    return instance.instance_id


def _gist(instance: Instance) -> tuple[object, ...]:
    """Returns what the ETag of a page covers of an instance. The epoch stands for all that it
    registered."""
    return (
        instance.instance_id,
        instance.epoch,
        instance.state,
        instance.role,
        instance.weights_version,
        instance.drain_deadline,
        instance.load.models,
    )


@router.get(
    "/{instance_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownInstance, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def get(instance_id: _InstanceId, app: ControlPlaneDep) -> Instance:
    return await app.registry.instance(instance_id)


@router.put(
    "/{instance_id}/heartbeat",
    summary="Heartbeat",
    responses=responses(InvalidArgument, StaleEpoch, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, counted=False)  # a limit would cost a fleet behind one address its leases
async def heartbeat(
    instance_id: _InstanceId,
    body: Annotated[Heartbeat, Body()],
    app: ControlPlaneDep,
    secret: InstanceSecret = None,
) -> Lease:
    """Renews the lease. On stale-epoch the worker has lost its lease and registers again."""
    # Only requests that AnswerHeartbeats passes on come here.
    return await renew(app, instance_id, body, secret)


@router.post(
    "/{instance_id}/blocks",
    summary="Publish cached blocks",
    responses=responses(InvalidArgument, StaleEpoch, ControlPlaneUnavailable),
)
@allow(Scope.WORKER)
async def publish_blocks(
    instance_id: _InstanceId,
    body: Annotated[PublishBlocks, Body()],
    app: ControlPlaneDep,
    secret: InstanceSecret = None,
) -> PublishedBlocks:
    """Reports the prefixes that a worker has in its KV cache, so that prompts with one of them go
    to it.

    At most 32,768 hashes are kept. If an instance has more, those before the last update are
    forgotten. Hashes end with the lease: after a new registration send all of them, the first with
    `reset`. This renews no lease.
    """
    return await app.registry.publish_blocks(instance_id, body.epoch, body, secret=digest(secret))


@router.post(
    "/{instance_id}/drain",
    status_code=202,
    summary="Drain",
    responses=responses(InvalidArgument, UnknownInstance, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ADMIN)
async def drain(
    instance_id: _InstanceId,
    request: Request,
    app: ControlPlaneDep,
    body: Annotated[DrainRequest, Body()] = _DRAIN_DEFAULTS,
    secret: InstanceSecret = None,
) -> Instance:
    """Lets an instance finish its work and leave; it gets no new transfer.

    The worker learns of it at its next heartbeat. GET of the instance shows the progress: `load`,
    `reserved` and `drain_deadline`, and unknown-instance once it has left. A repeated request sets
    a new deadline.
    """
    drained = await app.registry.drain(
        instance_id,
        seconds=body.deadline_seconds,
        secret=asked_of(request, secret, Scope.ADMIN),
    )
    audit.note(request, "drain", instance_id=instance_id, seconds=body.deadline_seconds)
    return drained


@router.delete(
    "/{instance_id}/drain",
    summary="Undo a drain",
    responses=responses(InvalidArgument, UnknownInstance, InstanceLeaving, ControlPlaneUnavailable),
)
@allow(Scope.ADMIN)
async def undrain(instance_id: _InstanceId, request: Request, app: ControlPlaneDep) -> Instance:
    """Cancels a drain, unless the worker has begun to leave.

    The instance is joining until its worker's next heartbeat says that it is ready. An instance
    that is not draining stays as it is.
    """
    undrained = await app.registry.undrain(instance_id)
    audit.note(request, "undo drain", instance_id=instance_id)
    return undrained


@router.post(
    "/{instance_id}/role",
    summary="Change role",
    responses=responses(InvalidArgument, UnknownInstance, ControlPlaneUnavailable),
)
@allow(Scope.ADMIN)
async def change_role(
    instance_id: _InstanceId,
    body: Annotated[RoleChange, Body()],
    request: Request,
    app: ControlPlaneDep,
) -> Instance:
    """Changes the role of an instance without a restart.

    New transfers use the new role at once; the worker learns of it at its next heartbeat. Open
    transfers go on as they began.
    """
    changed = await app.registry.change_role(instance_id, body.role)
    audit.note(request, "change role", instance_id=instance_id, role=body.role.value)
    return changed


@router.delete(
    "/{instance_id}",
    status_code=204,
    summary="Deregister",
    responses=responses(InvalidArgument, UnknownInstance, StaleEpoch, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ADMIN)
async def deregister(
    instance_id: _InstanceId,
    epoch: Annotated[Epoch, Query(**parameter(Epoch))],
    request: Request,
    app: ControlPlaneDep,
    secret: InstanceSecret = None,
) -> None:
    """Ends the lease, and with it the reservations on the instance."""
    shown = asked_of(request, secret, Scope.ADMIN)
    await app.registry.deregister(instance_id, epoch, secret=shown)
    if is_operator(request):
        audit.note(request, "deregister", instance_id=instance_id, epoch=epoch)
