"""A router asks for a pair of workers, and gives it back."""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Body, Path, Query, Response

from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
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
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.ticket import Ticket, sign_ticket
from kvxfer.tracing.span import incoming
from kvxfer.transfers import (
    OpenedTransfer,
    Transfer,
    TransferId,
    TransferList,
    TransferRequest,
)
from kvxfer.web.tokens import Scope

router = APIRouter(route_class=GuardedRoute, prefix="/v1/transfers", tags=["transfers"])
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
    body: Annotated[TransferRequest, Body()], app: ControlPlaneDep, response: Response
) -> OpenedTransfer:
    """Reserves the best pair and returns it with a signed ticket for both workers, or the best
    instance that serves the request alone.

    A caller that names the transfer (`transfer_id`) may ask again: while the transfer is open, it
    gets the same pair and the same ticket.

    The reservation ends by DELETE, with `expires_at`, or when one of the two instances is gone.
    """
    transfer = await open_transfer(
        app.registry, body, seconds=app.settings.transfer_seconds, clock=app.clock
    )
    ticket = "" if body.aggregated else sign_ticket(_ticket(transfer), app.settings.signing_keys)
    response.headers["Location"] = f"{router.prefix}/{transfer.transfer_id}"
    return OpenedTransfer.of(transfer, ticket)


@router.get("", summary="List", responses=responses(InvalidArgument, ControlPlaneUnavailable))
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def list_transfers(
    app: ControlPlaneDep,
    instance_id: Annotated[
        InstanceId | None,
        Query(
            **{**parameter(InstanceId), "description": "Transfers that this instance is a side of."}
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="At most so many.")] = 1000,
) -> TransferList:
    """The open transfers, the oldest first, without their tickets."""
    found = (
        transfer
        for transfer in await app.registry.transfers()
        if instance_id in (None, transfer.prefill.instance_id, transfer.decode.instance_id)
    )
    return TransferList(transfers=tuple(islice(found, limit)))


@router.get(
    "/{transfer_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
@allow(Scope.WORKER, Scope.ROUTER, Scope.ADMIN)
async def get(transfer_id: _TransferId, app: ControlPlaneDep) -> Transfer:
    """The open transfer, without its ticket."""
    return await app.registry.transfer(transfer_id)


@router.delete(
    "/{transfer_id}",
    status_code=204,
    summary="Release",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
@allow(Scope.ROUTER, Scope.ADMIN)
async def release(transfer_id: _TransferId, app: ControlPlaneDep) -> None:
    """Gives the reservation back; a transfer under way goes on."""
    await app.registry.release(transfer_id)


def _ticket(transfer: Transfer) -> Ticket:
    return Ticket(
        transfer_id=transfer.transfer_id,
        request_id=transfer.request_id,
        prefill_id=transfer.prefill.instance_id,
        prefill_epoch=transfer.prefill.epoch,
        decode_id=transfer.decode.instance_id,
        decode_epoch=transfer.decode.epoch,
        expires_at=transfer.expires_at,
        issued_at=transfer.created_at,
        traceparent=incoming.get(),
    )
