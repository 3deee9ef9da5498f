"""Block tables as decode would sign them."""

from __future__ import annotations

from typing import Any

from kvxfer.kv.block_table import BlockTable, sign_block_table
from kvxfer.kv.messages import Offer
from kvxfer.ticket import Ticket, sign_ticket
from verify.processes.control_plane import CLUSTER_KEY

TICKET = Ticket(
    transfer_id="t-1",
    request_id="r-1",
    prefill_id="p",
    prefill_epoch=1,
    decode_id="d",
    decode_epoch=2,
    expires_at=4_000_000_000.0,
)


def block_table(
    ticket: Ticket = TICKET,
    /,
    *,
    key: bytes = CLUSTER_KEY,
    ticket_key: bytes = CLUSTER_KEY,
    **offer: Any,
) -> BlockTable:
    """Returns decode's signed table under a ticket; `offer` replaces fields of its offer."""
    said: dict[str, Any] = {
        "transfer_id": ticket.transfer_id,
        "ticket": sign_ticket(ticket, ticket_key),
        "blocks": b"\3\0\0\0\7\0\0\0",
        "grants": (b"\0descriptor\xff",) * 4,
        "imm": 65537,
        "lease_seconds": 20.5,
        **offer,
    }
    return sign_block_table(Offer(**said), ticket, key)
