from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import random

import jwt
import pytest

from kvxfer.errors import InvalidArgument, TicketExpired, TicketInvalid
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket, verify_ticket, watch_ticket_keys

KEY = b"a cluster key of enough bytes"
TICKET = Ticket(
    transfer_id="t-1",
    request_id="cmpl-7",
    prefill_id="prefill-0",
    prefill_epoch=1795046400000001,
    decode_id="decode-0",
    decode_epoch=1795046400000002,
    expires_at=1000.25,
)


def encode(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def test_verified_ticket_is_the_signed_one():
    assert verify_ticket(sign_ticket(TICKET, KEY), KEY, now=1000.0) == TICKET


def test_key_may_be_text():
    assert verify_ticket(sign_ticket(TICKET, KEY.decode()), KEY, now=1000.0) == TICKET


def test_a_bearer_ticket_names_its_prompt_and_no_decode_worker():
    bearer = dataclasses.replace(TICKET, decode_id="", decode_epoch=0, prompt_digest=b"\x00\xff")
    read = verify_ticket(sign_ticket(bearer, KEY), KEY, now=1000.0)
    assert read == bearer
    assert (read.bearer, TICKET.bearer) == (True, False)


@pytest.mark.parametrize(("now", "valid"), [(1005.24, True), (1005.25, False), (1006.0, False)])
def test_ticket_is_valid_until_the_fraction_of_a_second_it_names_and_5_seconds_more(now, valid):
    token = sign_ticket(TICKET, KEY)
    if valid:
        assert verify_ticket(token, KEY, now=now) == TICKET
    else:
        with pytest.raises(TicketExpired, match="t-1 expired"):
            verify_ticket(token, KEY, now=now)


AT_NOON = dataclasses.replace(TICKET, issued_at=1795953600.0, expires_at=1795953660.0)


@pytest.mark.parametrize("seconds", [-5.0, -4.0, 0.0, 64.9])
def test_clocks_that_differ_a_little_refuse_no_new_ticket(seconds):
    now = AT_NOON.issued_at + seconds
    assert verify_ticket(sign_ticket(AT_NOON, KEY), KEY, now=now) == AT_NOON


def test_a_clock_that_is_ahead_is_named_with_both_times():
    with pytest.raises(TicketExpired) as refused:
        verify_ticket(sign_ticket(AT_NOON, KEY), KEY, now=AT_NOON.issued_at + 90)
    assert str(refused.value) == (
        "the ticket of transfer t-1 expired 30.0 s ago: it was signed at 2026-11-29 12:00:00Z by "
        "its signer's clock, for 60 s, and by the clock of this host it is 2026-11-29 12:01:30Z. "
        "If the request is not 90 s old, these clocks differ: synchronise them (NTP). Otherwise "
        "send the request again for a new ticket"
    )


def test_a_clock_that_is_behind_is_named_with_both_times():
    with pytest.raises(TicketInvalid) as refused:
        verify_ticket(sign_ticket(AT_NOON, KEY), KEY, now=AT_NOON.issued_at - 90)
    assert str(refused.value) == (
        "the ticket of transfer t-1 was signed at 2026-11-29 12:00:00Z by its signer's clock, and "
        "by the clock of this host it is 2026-11-29 11:58:30Z: they differ by at least 90.0 s; "
        "synchronise the clocks of the hosts (NTP)"
    )


@pytest.mark.parametrize("time", [float("nan"), float("inf"), 1e300])
def test_an_impossible_time_is_refused(time):
    for ticket in (
        dataclasses.replace(TICKET, issued_at=time),
        dataclasses.replace(TICKET, issued_at=1.0, expires_at=-time),
    ):
        with pytest.raises(TicketInvalid):
            verify_ticket(sign_ticket(ticket, KEY), KEY, now=2000.0)


def test_ticket_of_another_cluster_is_refused():
    with pytest.raises(TicketInvalid, match="same cluster key"):
        verify_ticket(sign_ticket(TICKET, KEY), b"the key of another cluster", now=0)


def sign_claims(claims: dict[str, object], key: bytes, **header: object) -> str:
    headers = {"kid": KEY_ID, **header}
    return jwt.encode(
        claims, key, algorithm="HS256", headers={n: v for n, v in headers.items() if v is not None}
    )


CLAIMS = {
    "iss": "kvxfer",
    "jti": "t-1",
    "request_id": "cmpl-7",
    "prefill": {"id": "prefill-0", "epoch": 1795046400000001},
    "decode": {"id": "decode-0", "epoch": 1795046400000002},
    "exp": 1000.25,
}
SIGNING_KEY = hmac.new(KEY, b"kvxfer ticket", hashlib.sha256).digest()
KEY_ID = hmac.new(SIGNING_KEY, b"kvxfer ticket key id", hashlib.sha256).hexdigest()[:16]


def test_key_is_derived_from_the_cluster_key_which_itself_signs_nothing():
    assert verify_ticket(sign_claims(CLAIMS, SIGNING_KEY), KEY, now=1000.0) == TICKET
    with pytest.raises(TicketInvalid):
        verify_ticket(sign_claims(CLAIMS, KEY.ljust(32, b".")), KEY.ljust(32, b"."), now=1000.0)


def test_every_flipped_character_is_noticed(seed):
    token = sign_ticket(TICKET, KEY)
    source = random.Random(seed)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for position, old in enumerate(token):
        # The last character of a part has bits that encode nothing.
        if old == "." or token[position + 1 : position + 2] in ("", "."):
            continue
        new = source.choice(alphabet.replace(old, ""))
        with pytest.raises(TicketInvalid):
            verify_ticket(token[:position] + new + token[position + 1 :], KEY, now=1000.0)


@pytest.mark.parametrize("algorithm", ["none", "HS512", "RS256"])
def test_no_algorithm_but_hs256_is_accepted(algorithm):
    _, payload, signature = sign_ticket(TICKET, KEY).split(".")
    header = encode({"alg": algorithm, "typ": "JWT"})
    for tail in (signature, ""):
        with pytest.raises(TicketInvalid):
            verify_ticket(f"{header}.{payload}.{tail}", KEY, now=0)


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "not a token",
        "a.b.c",
        "\ud800.\ud800.\ud800",
        "é.é.é",
        base64.urlsafe_b64encode(b"[" * 3000).decode() + ".e30.e30",
        "x" * 4097,
    ],
    ids=["empty", "dot", "dots", "words", "short", "surrogate", "latin", "nested", "long"],
)
def test_damaged_token_is_invalid_and_nothing_worse(token):
    with pytest.raises(TicketInvalid):
        verify_ticket(token, KEY, now=0)


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("iss", "somebody"),
        ("request_id", None),
        ("prefill", "prefill-0"),
        ("decode", {"id": "d", "epoch": "1"}),
        ("exp", "tomorrow"),
        ("prompt", "no base64"),
    ],
)
def test_signed_token_with_a_claim_of_the_wrong_kind_is_invalid(claim, value):
    with pytest.raises(TicketInvalid):
        verify_ticket(sign_claims({**CLAIMS, claim: value}, SIGNING_KEY), KEY, now=0)


@pytest.mark.parametrize("claim", sorted(CLAIMS))
def test_signed_token_without_a_claim_is_invalid(claim):
    claims = {name: value for name, value in CLAIMS.items() if name != claim}
    with pytest.raises(TicketInvalid):
        verify_ticket(sign_claims(claims, SIGNING_KEY), KEY, now=0)


# --- several keys ----------------------------------------------------------------------------

OLD, NEW = b"the key of last month", b"the key of this month"


def test_a_key_is_exchanged_while_its_tickets_are_under_way():
    before = sign_ticket(TICKET, TicketKeys([OLD, NEW]))
    after = sign_ticket(TICKET, TicketKeys([NEW, OLD]))
    for keys in (TicketKeys([OLD, NEW]), TicketKeys([NEW, OLD])):
        for token in (before, after):
            assert verify_ticket(token, keys, now=1000.0) == TICKET
    assert verify_ticket(after, TicketKeys([NEW]), now=1000.0) == TICKET
    with pytest.raises(TicketInvalid, match="key that is not known"):
        verify_ticket(before, TicketKeys([NEW]), now=1000.0)


@pytest.mark.parametrize("key_id", [None, "", "0123456789abcdef"])
def test_a_ticket_names_the_key_that_signed_it(key_id):
    with pytest.raises(TicketInvalid):
        verify_ticket(sign_claims(CLAIMS, SIGNING_KEY, kid=key_id), KEY, now=1000.0)


def test_the_id_of_another_key_helps_no_forger():
    keys = TicketKeys([OLD, NEW])
    other = sign_ticket(TICKET, NEW).split(".")
    mine = sign_ticket(TICKET, OLD).split(".")
    with pytest.raises(TicketInvalid, match="Signature"):
        verify_ticket(".".join([other[0], *mine[1:]]), keys, now=1000.0)


def test_keys_come_from_a_file_and_follow_it(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(OLD.replace(b" ", b"-") + b"\n")
    watched = watch_ticket_keys(file)
    first = watched.current.signing_id
    file.write_bytes(NEW.replace(b" ", b"-") + b"\n" + OLD.replace(b" ", b"-") + b"\n")
    assert watched.refresh()
    assert watched.current.signing_id != first
    watched.current.find(first)
    file.write_bytes(b"short")
    assert not watched.refresh()
    watched.current.find(first)
    with pytest.raises(InvalidArgument, match="at least one"):
        TicketKeys([])


def test_short_cluster_key_is_refused_at_both_ends():
    with pytest.raises(InvalidArgument, match="at least 16"):
        sign_ticket(TICKET, b"short")
    with pytest.raises(InvalidArgument, match="at least 16"):
        verify_ticket(sign_ticket(TICKET, KEY), b"short", now=0)
