"""A block table that goes through the control plane: decode's OFFER, signed by decode.

The key is derived from the cluster's ticket keys. A router that carries the table, or another
client of the control plane, can therefore neither make one nor change a block id, the immediate, a
grant or the time in it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated, Final, Protocol

import msgspec

from kvxfer.errors import TicketInvalid
from kvxfer.instances import Epoch, InstanceId
from kvxfer.kv.messages import Offer
from kvxfer.record import Record
from kvxfer.ticket import Ticket, TicketKeys, as_ticket_keys, verify_ticket

# Room for the base64 of the longest OFFER that fits into a message, and for the rest.
MAX_JSON_BYTES: Final = 3 << 19

_KEY_PURPOSE: Final = b"kvxfer block table"
_encode: Final = msgspec.msgpack.Encoder().encode


class BlockTable(Record, frozen=True, kw_only=True):
    """An offer, the decode worker that made it, and a signature that only workers can make.

    decode → control plane → prefill. In JSON its bytes are base64 (RFC 4648).
    """

    offer: Offer
    decode_id: Annotated[InstanceId, msgspec.Meta(examples=["decode-0"])]
    decode_epoch: Epoch
    kid: Annotated[str, msgspec.Meta(max_length=64, examples=["8c1f02b7d94e6a35"])]
    """Id of the ticket key that signed it."""
    mac: Annotated[bytes, msgspec.Meta(examples=["q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k="])]
    """HMAC-SHA256 over the msgpack of offer, decode_id and decode_epoch."""


class BlockTables(Protocol):
    """A store in which block tables wait for prefill: the control plane, through a
    ControlPlaneClient.

    `deadline`, in seconds, bounds all attempts of a call together. Both methods raise
    UnknownTransfer and ControlPlaneUnavailable.
    """

    async def put_block_table(self, table: BlockTable, *, deadline: float) -> None: ...

    async def block_table(
        self, transfer_id: str, *, wait_seconds: float, deadline: float
    ) -> BlockTable:
        """Returns the block table of a transfer. Raises UnknownBlockTable if it does not come
        within `wait_seconds`."""


def sign_block_table(offer: Offer, ticket: Ticket, keys: TicketKeys | bytes | str) -> BlockTable:
    """Returns the table of an OFFER that decode makes under `ticket`."""
    keys = as_ticket_keys(keys)
    return BlockTable(
        offer=offer,
        decode_id=ticket.decode_id,
        decode_epoch=ticket.decode_epoch,
        kid=keys.signing_id,
        mac=_mac(keys.signing_key, offer, ticket.decode_id, ticket.decode_epoch),
    )


def verify_block_table(table: BlockTable, keys: TicketKeys | bytes | str, *, now: float) -> Ticket:
    """Returns the ticket of a table that decode made under it and that was not changed.

    Raises TicketInvalid if table or ticket was not signed with one of the keys or is damaged, or if
    they are not of one transfer and decode worker; TicketExpired if it has expired at `now`.
    """
    keys = as_ticket_keys(keys)
    offer = table.offer
    what = f"the block table of transfer {offer.transfer_id}"
    key = keys.find(table.kid, what)
    if not hmac.compare_digest(table.mac, _mac(key, offer, table.decode_id, table.decode_epoch)):
        raise TicketInvalid(
            f"{what} cannot be trusted (its signature does not fit); pass it on as decode made it"
        )
    ticket = verify_ticket(offer.ticket, keys, now=now)
    if ticket.transfer_id != offer.transfer_id:
        raise TicketInvalid(f"{what} carries the ticket of transfer {ticket.transfer_id}")
    if (table.decode_id, table.decode_epoch) != (ticket.decode_id, ticket.decode_epoch):
        raise TicketInvalid(
            f"{what} is from {table.decode_id!r} of epoch {table.decode_epoch}, its ticket names "
            f"decode worker {ticket.decode_id!r} of epoch {ticket.decode_epoch}"
        )
    return ticket


def _mac(key: bytes, offer: Offer, decode_id: str, decode_epoch: int) -> bytes:
    try:
        signed = _encode((offer, decode_id, decode_epoch))
    except OverflowError as error:  # JSON has longer numbers than msgpack
        raise TicketInvalid(
            f"the block table of transfer {offer.transfer_id} has a number of more than 64 bits; "
            "pass it on as decode made it"
        ) from error
    own = hmac.digest(key, _KEY_PURPOSE, hashlib.sha256)
    return hmac.digest(own, signed, hashlib.sha256)
