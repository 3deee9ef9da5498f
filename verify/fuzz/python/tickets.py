"""Signed data: tickets, block tables that pass through the control plane, introductions of SGLang's
prefill servers.

Unsigned data is always refused. Signed data may say anything.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec

from kvxfer import ticket as tickets
from kvxfer.connectors.sglang.introduction import (
    Introduction,
    sign_introduction,
    verify_introduction,
)
from kvxfer.errors import TicketInvalid
from kvxfer.kv.block_table import BlockTable, _mac, sign_block_table, verify_block_table
from kvxfer.kv.messages import Offer
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket, verify_ticket
from kvxfer.unreadable import UNREADABLE
from verify.fuzz.python.choices import Choices

DECODERS = {
    "kvxfer/ticket.py": ["verify_ticket", "TicketKeys.find"],
    "kvxfer/kv/block_table.py": ["verify_block_table"],
    "kvxfer/connectors/sglang/introduction.py": ["verify_introduction"],
}

KEYS = TicketKeys([b"0123456789abcdef0123456789abcdef"])
NOW = 1_000_000.0


def run(data: bytes) -> None:
    choices = Choices(data)
    kinds = (_token, _signed_ticket, _claims, _block_table, _table_json, _introduction, _about)
    kinds[choices.below(len(kinds))](choices)


def _signed(payload: bytes, header: dict[str, Any]) -> str:
    return tickets._jws.encode(
        payload, KEYS.signing_key, algorithm="HS256", headers={"kid": KEYS.signing_id, **header}
    )


def _token(choices: Choices) -> None:
    """Checks that a token of a sender without a key is refused."""
    token = choices.rest().decode("utf-8", "surrogateescape")
    for verify in (
        lambda: verify_ticket(token, KEYS, now=NOW),
        lambda: verify_introduction(token, KEYS, "somebody"),
    ):
        try:
            verify()
        except TicketInvalid:
            continue
        raise AssertionError("an unsigned token is trusted")


def _claims(choices: Choices) -> None:
    """Reads any payload under the signature of the cluster."""
    header = {"typ": choices.text()} if choices.flag() else {}
    token = _signed(choices.rest(), header)
    with contextlib.suppress(TicketInvalid):
        verify_ticket(token, KEYS, now=NOW)
    with contextlib.suppress(TicketInvalid):
        verify_introduction(token, KEYS, "somebody")


def _ticket(choices: Choices) -> Ticket:
    return Ticket(
        transfer_id=choices.text(),
        request_id=choices.text(),
        prefill_id=choices.text(),
        prefill_epoch=choices.byte(),
        decode_id=choices.text(),
        decode_epoch=choices.byte(),
        expires_at=NOW + choices.byte() - 100,
        prompt_digest=choices.bytes(),
    )


def _signed_ticket(choices: Choices) -> None:
    ticket = _ticket(choices)
    token = sign_ticket(ticket, KEYS)
    late = ticket.good_until <= NOW
    try:
        assert verify_ticket(token, KEYS, now=NOW) == ticket
        assert not late
    except TicketInvalid:
        assert late or len(token) > 4096
    damaged = bytearray(token.encode())
    at, bit = choices.byte() % len(damaged), 1 << choices.below(7)
    damaged[at] ^= bit
    with contextlib.suppress(TicketInvalid):
        # Only bits that base64 does not use may differ.
        assert verify_ticket(damaged.decode(), KEYS, now=NOW) == ticket


def _any_claims(choices: Choices) -> bytes:
    claims: dict[str, Any] = {
        "iss": choices.one_of(("kvxfer", "kvxfer sglang prefill", 7)),
        "jti": choices.text(),
        "request_id": choices.text(),
        "prefill": {"id": choices.text(), "epoch": choices.integer()},
        "decode": {"id": choices.text(), "epoch": choices.integer()},
        "exp": choices.one_of((NOW + 9, choices.number(), choices.integer(), 10**400)),
    }
    name = choices.one_of(("nbf", "iat", "aud", "exp", "prompt", "jti", "about"))
    if choices.flag():
        claims[name] = choices.one_of((choices.number(), [], "text", choices.integer(), 10**400))
    return json.dumps(claims).encode()


def _block_table(choices: Choices) -> None:
    ticket = _ticket(choices)
    token = sign_ticket(ticket, KEYS) if choices.flag() else _signed(_any_claims(choices), {})
    offer = Offer(
        transfer_id=choices.one_of((ticket.transfer_id, choices.text())),
        ticket=token,
        blocks=choices.bytes(),
        grants=(choices.bytes(),),
        imm=choices.integer(),
        lease_seconds=choices.number(),
        first_block=choices.byte(),
    )
    try:
        table = sign_block_table(offer, ticket, KEYS)
    except TicketInvalid:  # a number that no sender can encode
        return
    if choices.flag():
        epoch = choices.byte()
        mac = _mac(KEYS.signing_key, offer, ticket.decode_id, epoch)
        table = msgspec.structs.replace(table, decode_epoch=epoch, mac=mac)
    if choices.flag():
        table = msgspec.structs.replace(table, kid=choices.text())
    with contextlib.suppress(TicketInvalid):
        assert verify_block_table(table, KEYS, now=NOW).transfer_id == offer.transfer_id


def _table_json(choices: Choices) -> None:
    """Checks that a table of a sender without a key is refused, in the control plane's JSON."""
    try:
        table = msgspec.json.decode(choices.rest(), type=BlockTable)
    except UNREADABLE:
        return
    try:
        verify_block_table(table, KEYS, now=NOW)
    except TicketInvalid:
        return
    raise AssertionError("an unsigned block table is trusted")


def _introduction(choices: Choices) -> None:
    about = Introduction(
        instance_id=choices.text(),
        epoch=choices.byte(),
        engine_address=choices.text(),
        model=choices.text(),
        kv_dtype=choices.text(),
        page_size=choices.byte(),
        metadata_bytes=choices.byte(),
    )
    with contextlib.suppress(TicketInvalid):
        assert verify_introduction(sign_introduction(about, KEYS), KEYS, "somebody") == about


def _about(choices: Choices) -> None:
    with contextlib.suppress(TicketInvalid):
        verify_introduction(_signed(_any_claims(choices), {}), KEYS, "somebody")
    with contextlib.suppress(TicketInvalid):
        verify_ticket(_signed(_any_claims(choices), {}), KEYS, now=NOW)
