from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import msgspec
import pytest

from kvxfer.errors import TicketExpired, TicketInvalid
from kvxfer.kv.block_table import MAX_JSON_BYTES, BlockTable, verify_block_table
from kvxfer.kv.messages import Offer, encode
from kvxfer.ticket import TicketKeys, sign_ticket
from verify.processes.block_tables import TICKET, block_table
from verify.processes.control_plane import CLUSTER_KEY

OTHER_KEY = b"the key of another cluster"


def test_a_table_survives_json_and_is_verified_after_it() -> None:
    table = block_table()
    text = msgspec.json.encode(table)
    again = msgspec.json.decode(text, type=BlockTable)
    assert again == table
    assert verify_block_table(again, CLUSTER_KEY, now=0) == TICKET
    assert msgspec.json.decode(text)["offer"]["type"] == "offer"


@pytest.mark.parametrize("change", [
    {"transfer_id": "t-2"},
    {"ticket": sign_ticket(replace(TICKET, request_id="r-2"), CLUSTER_KEY)},
    {"blocks": b"\3\0\0\0\x08\0\0\0"},
    {"blocks": b"\7\0\0\0\3\0\0\0"},
    {"blocks": b"\3\0\0\0"},
    {"grants": (b"\0descriptor\xfe",) * 4},
    {"grants": (b"\0descriptor\xff",) * 3},
    {"imm": 65538},
    {"lease_seconds": 20.6},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_any_change_of_the_offer_is_noticed(change: dict[str, object]) -> None:
    table = block_table()
    offer = msgspec.structs.replace(table.offer, **change)
    with pytest.raises(TicketInvalid, match="its signature does not fit"):
        verify_block_table(msgspec.structs.replace(table, offer=offer), CLUSTER_KEY, now=0)


@pytest.mark.parametrize(
    "change", [{"decode_id": "e"}, {"decode_epoch": 3}, {"mac": bytes(32)}, {"mac": b""}]
)
def test_any_change_beside_the_offer_is_noticed(change: dict[str, object]) -> None:
    with pytest.raises(TicketInvalid, match="its signature does not fit"):
        verify_block_table(msgspec.structs.replace(block_table(), **change), CLUSTER_KEY, now=0)


def test_a_table_of_another_cluster_is_refused() -> None:
    with pytest.raises(TicketInvalid, match=r"block table of transfer t-1 cannot be trusted .*key"):
        verify_block_table(block_table(key=OTHER_KEY), CLUSTER_KEY, now=0)


def test_a_ticket_of_another_cluster_is_refused() -> None:
    with pytest.raises(TicketInvalid, match="the ticket cannot be trusted"):
        verify_block_table(block_table(ticket_key=OTHER_KEY), CLUSTER_KEY, now=0)


def test_the_signature_of_a_ticket_is_not_valid_for_a_table() -> None:
    """Nor is the ticket key valid as the key of tables."""
    table = block_table()
    keys = TicketKeys([CLUSTER_KEY])
    said = msgspec.msgpack.encode((table.offer, table.decode_id, table.decode_epoch))
    mac = hmac.digest(keys.signing_key, said, hashlib.sha256)
    with pytest.raises(TicketInvalid, match="its signature does not fit"):
        verify_block_table(msgspec.structs.replace(table, mac=mac), keys, now=0)


def test_a_table_under_the_ticket_of_another_transfer_or_decode_is_refused() -> None:
    other = sign_ticket(replace(TICKET, transfer_id="t-2"), CLUSTER_KEY)
    with pytest.raises(TicketInvalid, match="t-1 carries the ticket of transfer t-2"):
        verify_block_table(block_table(ticket=other), CLUSTER_KEY, now=0)
    stale = sign_ticket(replace(TICKET, decode_epoch=1), CLUSTER_KEY)
    with pytest.raises(TicketInvalid, match=r"'d' of epoch 2, its ticket names .* epoch 1"):
        verify_block_table(block_table(ticket=stale), CLUSTER_KEY, now=0)


def test_a_table_ends_with_its_ticket() -> None:
    with pytest.raises(TicketExpired):
        verify_block_table(block_table(), CLUSTER_KEY, now=TICKET.good_until)


def test_keys_can_be_exchanged_while_tables_are_under_way() -> None:
    new = b"the key of the next month"
    table = block_table(key=CLUSTER_KEY)
    assert verify_block_table(table, TicketKeys([new, CLUSTER_KEY]), now=0) == TICKET
    with pytest.raises(TicketInvalid, match="a key that is not known here"):
        verify_block_table(table, TicketKeys([new]), now=0)


def test_the_longest_offer_between_engines_fits_as_json() -> None:
    some, offer = bytes(1 << 18), block_table().offer
    rest = len(encode(msgspec.structs.replace(offer, blocks=some))) - len(some)
    longest: Offer = msgspec.structs.replace(offer, blocks=bytes((1 << 20) - rest))
    assert len(encode(longest)) == pytest.approx(1 << 20, abs=8)
    table = msgspec.structs.replace(block_table(), offer=longest)
    assert len(msgspec.json.encode(table)) < MAX_JSON_BYTES
