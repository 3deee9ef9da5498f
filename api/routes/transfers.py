"""A router asks for a pair of workers, and gives it back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from kvxfer.api.context import ControlPlaneDep
from kvxfer.api.problems import responses
from kvxfer.api.schemas.transfers import OpenedTransfer, Transfer, TransferId, TransferRequest
from kvxfer.errors import (
    ControlPlaneUnavailable,
    InvalidArgument,
    NoCapacity,
    PromptTooLong,
    UnknownTransfer,
)
from kvxfer.scheduler.transfers import open_transfer
from kvxfer.ticket import Ticket, sign_ticket
from kvxfer.transfers import Transfer as TransferRecord

router = APIRouter(prefix="/v1/transfers", tags=["transfers"])
_TransferId = Annotated[TransferId, Path(max_length=128)]


@router.post(
    "",
    status_code=201,
    summary="Open",
    responses=responses(InvalidArgument, PromptTooLong, NoCapacity, ControlPlaneUnavailable),
)
async def open_(body: TransferRequest, app: ControlPlaneDep, response: Response) -> OpenedTransfer:
    """Reserves the best pair and returns it with a signed ticket for both workers.

    The reservation ends by DELETE, with `expires_at`, or when one of the two instances is gone.
    """
    transfer = await open_transfer(
        app.registry, body.record(), seconds=app.settings.transfer_seconds, clock=app.clock
    )
    ticket = sign_ticket(_ticket(transfer), app.settings.cluster_key)
    response.headers["Location"] = f"{router.prefix}/{transfer.transfer_id}"
    return OpenedTransfer(**Transfer.model_validate(transfer).model_dump(), ticket=ticket)


@router.get(
    "/{transfer_id}",
    summary="Get",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
async def get(transfer_id: _TransferId, app: ControlPlaneDep) -> Transfer:
    """The open transfer, without its ticket."""
    return Transfer.model_validate(await app.registry.transfer(transfer_id))


@router.delete(
    "/{transfer_id}",
    status_code=204,
    summary="Release",
    responses=responses(InvalidArgument, UnknownTransfer, ControlPlaneUnavailable),
)
async def release(transfer_id: _TransferId, app: ControlPlaneDep) -> None:
    """Gives the reservation back; a transfer under way goes on."""
    await app.registry.release(transfer_id)


def _ticket(transfer: TransferRecord) -> Ticket:
    return Ticket(
        transfer_id=transfer.transfer_id,
        request_id=transfer.request_id,
        prefill_id=transfer.prefill.instance_id,
        prefill_epoch=transfer.prefill.epoch,
        decode_id=transfer.decode.instance_id,
        decode_epoch=transfer.decode.epoch,
        expires_at=transfer.expires_at,
    )
