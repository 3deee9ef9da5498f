"""The opening and release of transfers: two requests of a router for each of its clients'."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec
from fastapi import Request
from starlette.types import Receive

from kvxfer.api.context import ControlPlane
from kvxfer.api.direct import Answer, AnswerDirectly
from kvxfer.prefix_hashes import from_text
from kvxfer.ticket import Ticket, sign_ticket
from kvxfer.tracing.span import incoming
from kvxfer.transfers import OpenedTransfer, Transfer, TransferRequest
from kvxfer.web.answer import while_connected

PATH: Final = "/v1/transfers"
_PATH_OF_ONE: Final = re.compile(PATH + r"/([A-Za-z0-9][A-Za-z0-9._:-]{0,127})")
_HASH: Final = re.compile("[0-9a-f]{16}")
_MEMBERS: Final = frozenset(TransferRequest.__struct_fields__)

_write = msgspec.json.Encoder().encode


async def open_transfer(
    control_plane: ControlPlane, body: TransferRequest, receive: Receive
) -> OpenedTransfer:
    """Opens a transfer. With `wait_seconds` the request waits its turn, until its client leaves."""
    opening = control_plane.admission.open(body)
    if body.wait_seconds:
        opening = while_connected(receive, control_plane.unless_stopping(opening))
    transfer = await opening
    keys = control_plane.settings.signing_keys
    ticket = "" if transfer.aggregated else sign_ticket(_ticket(transfer), keys)
    return OpenedTransfer.of(transfer, ticket)


def location(transfer: OpenedTransfer) -> str:
    return f"{PATH}/{transfer.transfer_id}"


class OpenTransfers(AnswerDirectly):
    method = "POST"

    def match(self, path: str) -> bool | None:
        return path == PATH or None

    def read(self, content: bytes) -> TransferRequest:
        members: Any = msgspec.json.decode(content)
        if not isinstance(members, dict) or not members.keys() <= _MEMBERS:
            raise msgspec.ValidationError("an unknown member")
        hashes = members.get("prefix_hashes")
        if hashes is not None:
            if not isinstance(hashes, list) or not all(map(_HASH.fullmatch, map(str, hashes))):
                raise msgspec.ValidationError("an invalid hash")
            members["prefix_hashes"] = from_text(hashes)
        return msgspec.convert(members, TransferRequest)

    async def answer(self, request: Request, found: bool, body: TransferRequest) -> Answer:  # noqa: ARG002
        opened = await open_transfer(self.control_plane, body, request.receive)
        return Answer(201, _write(opened), ((b"location", location(opened).encode()),))


class ReleaseTransfers(AnswerDirectly):
    method = "DELETE"
    has_body = False

    def match(self, path: str) -> str | None:
        found = _PATH_OF_ONE.fullmatch(path)
        return None if found is None else found[1]

    async def answer(self, request: Request, found: str, body: bytes) -> Answer:  # noqa: ARG002
        await self.control_plane.registry.release(found)
        return Answer(204)


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
