"""A decode worker leaves its block table, and the prefill worker of the pair fetches it."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Body, Path, Query, Request, Response

from kvxfer.api import refusals
from kvxfer.api.access import GuardedRoute, allow
from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.errors import (
    BlockTableExists,
    BlockTableMismatch,
    ControlPlaneUnavailable,
    InvalidArgument,
    TicketExpired,
    TicketInvalid,
    UnknownBlockTable,
    UnknownTransfer,
)
from kvxfer.kv.block_table import BlockTable, verify_block_table
from kvxfer.record_schema import parameter
from kvxfer.ticket import Ticket
from kvxfer.transfers import Transfer, TransferId
from kvxfer.web.answer import while_connected
from kvxfer.web.tokens import Scope

PATH: Final = "/v1/transfers/{transfer_id}/block-table"

router = APIRouter(route_class=GuardedRoute, tags=["transfers"])
_TransferId = Annotated[TransferId, Path(max_length=128, **parameter(TransferId))]


@router.post(
    PATH,
    status_code=201,
    summary="Put block table",
    response_class=Response,
    responses=responses(
        InvalidArgument,
        TicketInvalid,
        TicketExpired,
        UnknownTransfer,
        BlockTableExists,
        BlockTableMismatch,
        ControlPlaneUnavailable,
    ),
)
@allow(Scope.WORKER, Scope.ROUTER)
async def put(
    transfer_id: _TransferId, body: Annotated[BlockTable, Body()], app: ControlPlaneDep
) -> Response:
    """Leaves decode's block table for prefill, if decode cannot send it to prefill itself.

    Decode signs it, so a router may carry it but cannot change it. A transfer takes one table,
    which is dropped with the transfer. Sending the same table again changes nothing.
    """
    ticket = verify_block_table(body, app.settings.signing_keys, now=app.clock.unix())
    if ticket.transfer_id != transfer_id:
        raise refusals.block_table_of_another(ticket.transfer_id, transfer_id)
    _require_pair(await app.registry.transfer(transfer_id), ticket)
    await app.registry.put_block_table(transfer_id, body)
    return Response(status_code=201, headers={"Location": PATH.format(transfer_id=transfer_id)})


@router.get(
    PATH,
    summary="Get block table",
    responses=responses(
        InvalidArgument, UnknownTransfer, UnknownBlockTable, ControlPlaneUnavailable
    ),
)
@allow(Scope.WORKER)
async def get(
    transfer_id: _TransferId,
    request: Request,
    app: ControlPlaneDep,
    wait_seconds: Annotated[
        float, Query(ge=0, le=30, description="The longest wait for the block table.")
    ] = 0.0,
) -> BlockTable:
    """Returns the block table of an open transfer. A wait ends at once if the transfer ends."""
    work = app.registry.block_table(transfer_id, wait_seconds=wait_seconds)
    return await while_connected(request.receive, app.unless_stopping(work))


def _require_pair(transfer: Transfer, ticket: Ticket) -> None:
    """Raises BlockTableMismatch if the ticket is not for the reserved pair."""
    for side, party, said in (
        ("prefill", transfer.prefill, (ticket.prefill_id, ticket.prefill_epoch)),
        ("decode", transfer.decode, (ticket.decode_id, ticket.decode_epoch)),
    ):
        if said != (party.instance_id, party.epoch):
            raise BlockTableMismatch(
                f"the ticket of the block table names {side} worker {said[0]!r} of epoch "
                f"{said[1]}, transfer {transfer.transfer_id!r} has {party.instance_id!r} of epoch "
                f"{party.epoch}; open a new transfer",
                transfer_id=transfer.transfer_id,
            )
