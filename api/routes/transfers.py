"""The reservation of a pair of workers for a router, and its release."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Request, Response

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.openings import PATH, location, open_transfer
from kvxfer.api.pages import LINK, Cursor, answer, position, take
from kvxfer.api.problems import responses
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    NoCapacity,
    NotAggregating,
    PromptTooLong,
    ScorerFailed,
    TransferExists,
    UnknownTransfer,
)
from kvxfer.instances import InstanceId
from kvxfer.record_schema import parameter
from kvxfer.transfers import (
    OpenedTransfer,
    Transfer,
    TransferId,
    TransferList,
    TransferRequest,
)
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix=PATH, tags=["transfers"])
_TransferId = Annotated[TransferId, Path(max_length=128, **parameter(TransferId))]


@router.post(
    "",
    status_code=201,
    summary="Open",
    responses=responses(
        InvalidArgument,
        PromptTooLong,
        TransferExists,
        ScorerFailed,
        NotAggregating,
        NoCapacity,
        ControlPlaneUnavailable,
    ),
)
@allow(Scope.ROUTER)
async def open_(
    body: Annotated[TransferRequest, Body()],
    request: Request,
    app: ControlPlaneDep,
    response: Response,
) -> OpenedTransfer:
    """Reserves the best pair and returns it with a signed ticket for both workers, or the best
    instance that serves the request alone.

    With `wait_seconds` the request waits its turn if no pair has room; a caller that disconnects
    gives up its turn. A caller that names the transfer (`transfer_id`) may ask again: while the
    transfer is open, it gets the same pair and the same ticket.

    The reservation ends by DELETE, at `expires_at`, or when one of the two instances is gone.
    """
    transfer = await open_transfer(app, body, request.receive)
    response.headers["Location"] = location(transfer)
    return transfer


@router.get(
    "",
    summary="List",
    response_model=TransferList,
    responses={
        200: {"headers": LINK},
        **responses(InvalidArgument, ControlPlaneUnavailable),
    },
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def list_transfers(
    request: Request,
    app: ControlPlaneDep,
    instance_id: Annotated[
        InstanceId | None,
        Query(**{**parameter(InstanceId), "description": "Transfers from or to this instance."}),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="The most per page.")] = 1000,
    cursor: Cursor = None,
) -> Response:
    """Lists the open transfers, the oldest first, without their tickets, in pages."""
    after = position(cursor, tuple[float, str])
    found = (
        transfer
        for transfer in sorted(await app.registry.transfers(), key=_age)
        if instance_id in (None, transfer.prefill.instance_id, transfer.decode.instance_id)
        and (after is None or _age(transfer) > after)
    )
    listed, last = take(found, limit, _age)
    return answer(request, TransferList(transfers=listed), last=last)


def _age(transfer: Transfer) -> tuple[float, str]:
    return transfer.created_at, transfer.transfer_id


@router.get(
    "/{transfer_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def get(transfer_id: _TransferId, app: ControlPlaneDep) -> Transfer:
    """Returns an open transfer, without its ticket."""
    return await app.registry.transfer(transfer_id)


@router.delete(
    "/{transfer_id}",
    status_code=204,
    summary="Release",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
@allow(Scope.ROUTER, Scope.ADMIN)
async def release(transfer_id: _TransferId, app: ControlPlaneDep) -> None:
    """Releases the reservation; a transfer under way goes on."""
    await app.registry.release(transfer_id)
