"""The ticket of one transfer: a signed promise that a pair may exchange the KV cache of a request.

A JWT (RFC 7519) with HS256. The control plane signs it, both workers verify it; the router that
carries it can neither make nor change one.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import Final

import jwt
import msgspec

from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import TicketExpired, TicketInvalid

_ALGORITHM: Final = "HS256"
_ISSUER: Final = "kvxfer"
_KEY_PURPOSE: Final = b"kvxfer ticket"
_MAX_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says. `expires_at` is in seconds since the Unix epoch."""

    transfer_id: str
    request_id: str
    prefill_id: str
    prefill_epoch: int
    decode_id: str
    decode_epoch: int
    expires_at: float


class _Side(msgspec.Struct, frozen=True):
    id: str
    epoch: int


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    jti: str
    request_id: str
    prefill: _Side
    decode: _Side
    exp: float


def sign_ticket(ticket: Ticket, cluster_key: bytes | str) -> str:
    """The ticket as a token. Raises InvalidArgument where the cluster key is too short."""
    claims = _Claims(
        iss=_ISSUER,
        jti=ticket.transfer_id,
        request_id=ticket.request_id,
        prefill=_Side(ticket.prefill_id, ticket.prefill_epoch),
        decode=_Side(ticket.decode_id, ticket.decode_epoch),
        exp=ticket.expires_at,
    )
    return jwt.encode(msgspec.to_builtins(claims), _signing_key(cluster_key), algorithm=_ALGORITHM)


def verify_ticket(token: str, cluster_key: bytes | str, *, now: float | None = None) -> Ticket:
    """The ticket of a token that this cluster signed and that has not expired at `now`.

    Raises TicketInvalid where it was not signed with this key or is damaged, TicketExpired (a
    TicketInvalid) where it is too late.
    """
    if len(token) > _MAX_LENGTH:
        raise TicketInvalid(
            f"the ticket has {len(token)} characters; a real one has at most {_MAX_LENGTH}"
        )
    key = _signing_key(cluster_key)
    try:
        payload = jwt.decode(
            token,
            key,
            algorithms=[_ALGORITHM],
            issuer=_ISSUER,
            # Compared below: PyJWT would cut the fraction of a second off.
            options={"verify_exp": False},
        )
        claims = msgspec.convert(payload, _Claims)
    except (jwt.PyJWTError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise TicketInvalid(
            f"the ticket cannot be trusted ({error}); take one from a control plane that has "
            "the same cluster key"
        ) from error
    late = (time.time() if now is None else now) - claims.exp
    if late >= 0:
        raise TicketExpired(
            f"the ticket of transfer {claims.jti} expired {late:.1f} s ago; "
            "ask the control plane for a new one"
        )
    return Ticket(
        transfer_id=claims.jti,
        request_id=claims.request_id,
        prefill_id=claims.prefill.id,
        prefill_epoch=claims.prefill.epoch,
        decode_id=claims.decode.id,
        decode_epoch=claims.decode.epoch,
        expires_at=claims.exp,
    )


def _signing_key(cluster_key: bytes | str) -> bytes:
    # A key of its own, so that a signature says nothing about the key of the engines.
    return hmac.new(as_cluster_key(cluster_key), _KEY_PURPOSE, hashlib.sha256).digest()
