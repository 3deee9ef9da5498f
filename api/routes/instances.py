"""Workers come, live and leave."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Response

from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.api.schemas.instances import (
    Epoch,
    Heartbeat,
    Instance,
    InstanceId,
    InstanceList,
    Lease,
    LiveState,
    RegisterInstance,
)
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InstanceExists,
    InvalidArgument,
    StaleEpoch,
    UnknownInstance,
)
from kvxfer.instances import InstanceState, Role

router = APIRouter(prefix="/v1/instances", tags=["instances"])
_InstanceId = Annotated[InstanceId, Path()]


@router.post(
    "",
    status_code=201,
    summary="Register",
    responses=responses(InvalidArgument, InstanceExists, ControlPlaneUnavailable),
)
async def register(body: RegisterInstance, app: ControlPlaneDep, response: Response) -> Lease:
    """Begins a lease with a new epoch. Send heartbeats to keep it."""
    lease = await app.registry.register(
        body.record(), state=InstanceState(body.state), incarnation=body.incarnation
    )
    response.headers["Location"] = f"{router.prefix}/{lease.instance_id}"
    return Lease.model_validate(lease)


@router.get(
    "",
    summary="List",
    response_model=InstanceList,
    responses=responses(InvalidArgument, ControlPlaneUnavailable),
)
async def list_instances(
    app: ControlPlaneDep,
    role: Annotated[
        Role | None, Query(description="Instances that take this side; `both` take either.")
    ] = None,
    model: Annotated[str | None, Query()] = None,
    state: Annotated[LiveState | None, Query()] = None,
) -> Response:
    """The live instances, ordered by id."""
    listed = [
        instance
        for instance in await app.registry.instances()
        if (role is None or instance.role.serves(role))
        and model in (None, instance.model)
        and state in (None, instance.state)
    ]
    # Records are known to be valid: through pydantic, a large fleet would hold up all others.
    body = {"instances": listed, "stale_seconds": app.registry.stale_seconds}
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get(
    "/{instance_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownInstance, ControlPlaneUnavailable),
)
async def get(instance_id: _InstanceId, app: ControlPlaneDep) -> Instance:
    return Instance.model_validate(await app.registry.instance(instance_id))


@router.put(
    "/{instance_id}/heartbeat",
    summary="Heartbeat",
    responses=responses(InvalidArgument, StaleEpoch, ControlPlaneUnavailable),
)
async def heartbeat(instance_id: _InstanceId, body: Heartbeat, app: ControlPlaneDep) -> Lease:
    """Renews the lease. On stale-epoch the worker has lost its lease and registers again."""
    lease = await app.registry.heartbeat(
        instance_id,
        body.epoch,
        state=None if body.state is None else InstanceState(body.state),
        load=None if body.load is None else body.load.record(),
    )
    app.metrics.heartbeats.inc()
    return Lease.model_validate(lease)


@router.delete(
    "/{instance_id}",
    status_code=204,
    summary="Deregister",
    responses=responses(InvalidArgument, UnknownInstance, StaleEpoch, ControlPlaneUnavailable),
)
async def deregister(
    instance_id: _InstanceId, epoch: Annotated[Epoch, Query()], app: ControlPlaneDep
) -> None:
    """Ends the lease, and with it the reservations on the instance."""
    await app.registry.deregister(instance_id, epoch)
