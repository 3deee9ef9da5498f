"""The ticket of one transfer: signed permission for a pair to exchange the KV cache of a request.

A ticket is a JWT (RFC 7519) with HS256. The control plane signs it, or a prefill worker that keeps
a prompt to be fetched. Both workers verify it. The router that carries it can neither make nor
change one. Its `kid` names the key that signed it, so that keys can be replaced while tickets are
in use.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

import jwt
import msgspec
from jwt.algorithms import HMACAlgorithm

from kvxfer.clock import CLOCK_LEEWAY, as_text
from kvxfer.cluster_key import as_cluster_key
from kvxfer.errors import InvalidArgument, TicketExpired, TicketInvalid
from kvxfer.watched_file import WatchedFile

_ALGORITHM: Final = "HS256"
_ISSUER: Final = "kvxfer"
_KEY_PURPOSE: Final = b"kvxfer ticket"
_KEY_ID_PURPOSE: Final = b"kvxfer ticket key id"
_MAX_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True)
class Ticket:
    """The content of a ticket. Times are in seconds since the Unix epoch.

    With an empty `decode_id` it is a bearer ticket: the first decode worker of the cluster that
    comes with it gets the transfer. `prompt_digest` names the prompt, if the signer knows it.
    `issued_at` is 0 if the signer does not state it.
    """

    transfer_id: str
    request_id: str
    prefill_id: str
    prefill_epoch: int
    decode_id: str
    decode_epoch: int
    expires_at: float
    prompt_digest: bytes = b""
    issued_at: float = 0.0
    traceparent: str = ""
    """The trace that the transfer is a part of, if it is recorded."""
    adapter: str = ""
    """The digest of the request's LoRA, if it has one and the signer knows it."""
    token: str = field(default="", compare=False, repr=False)
    """The signed ticket; empty if it was not verified."""

    @property
    def good_until(self) -> float:
        """The time from which a worker refuses it. It is later than `expires_at`, so that a worker
        whose clock is a little ahead of the signer's accepts a new ticket. A worker remembers a
        ticket until then."""
        return self.expires_at + CLOCK_LEEWAY

    @property
    def bearer(self) -> bool:
        """Whether any decode worker may use it."""
        return not self.decode_id


class TicketKeys:
    """The keys of a cluster's tickets: the first signs, all of them verify.

    To replace a key without refusing a ticket, add the new key at the end everywhere, then move it
    to the front, then remove the old key when its last ticket has expired.
    """

    def __init__(self, secrets: Sequence[bytes | str]) -> None:
        """Raises InvalidArgument if there is none, or one is too short to be a secret."""
        if not secrets:
            raise InvalidArgument("there is no ticket key; give at least one")
        # Derived keys, so that a signature reveals nothing about the engines' key.
        keys = [_hmac(as_cluster_key(secret), _KEY_PURPOSE) for secret in secrets]
        self._by_id = {_hmac(key, _KEY_ID_PURPOSE)[:8].hex(): key for key in keys}
        self.signing_id = next(iter(self._by_id))

    @property
    def signing_key(self) -> bytes:
        """The first key, as derived for signing: 32 bytes."""
        return self._by_id[self.signing_id]

    def find(self, key_id: object, what: str = "the ticket") -> bytes:
        """Returns the key with this id. Raises TicketInvalid if there is none; `what`, in the
        message, was signed with it."""
        key = self._by_id.get(key_id) if isinstance(key_id, str) else None
        if key is None:
            raise TicketInvalid(
                f"{what} cannot be trusted (it was signed with a key that is not known here); "
                "give every worker and the control plane the same cluster key or ticket keys"
            )
        return key


@lru_cache(maxsize=8)
def derived_ticket_keys(cluster_key: bytes | str) -> TicketKeys:
    """Returns the one key that is derived from a cluster key."""
    return TicketKeys([cluster_key])


def watch_ticket_keys(path: Path) -> WatchedFile[TicketKeys]:
    """Returns the keys of a file, one per line, which follow its later changes. Raises
    InvalidArgument."""
    return WatchedFile("ticket keys file", path, lambda content: TicketKeys(content.split()))


class _DerivedKeys(HMACAlgorithm):
    """HS256 with keys of `TicketKeys`. It leaves out PyJWT's check at each use that a key is not a
    certificate, which takes as long as the signature."""

    def prepare_key(self, key: str | bytes) -> bytes:
        assert isinstance(key, bytes)  # noqa: S101 (no matter of input)
        return key


_jws: Final = jwt.PyJWS()
_jws.unregister_algorithm(_ALGORITHM)
_jws.register_algorithm(_ALGORITHM, _DerivedKeys(HMACAlgorithm.SHA256))


class _Side(msgspec.Struct, frozen=True):
    id: str
    epoch: int


class _Claims(msgspec.Struct, frozen=True, omit_defaults=True):
    iss: str
    jti: str
    request_id: str
    prefill: _Side
    decode: _Side
    exp: float
    prompt: bytes = b""  # in base64
    iat: float = 0.0
    trace: str = ""
    adapter: str = ""


def sign_ticket(ticket: Ticket, keys: TicketKeys | bytes | str) -> str:
    """Returns the ticket as a token, a JWT of at most 4,096 characters, signed with the first of
    `keys`. A cluster key stands for the key that is derived from it.

    The control plane signs a ticket for every transfer that it opens. Without a control plane, the
    program that sends a request to both workers signs it, with their ids and epochs. A prefill
    worker signs one for a prompt that it keeps to be fetched (a bearer ticket).
    """
    keys = as_ticket_keys(keys)
    claims = _Claims(
        iss=_ISSUER,
        jti=ticket.transfer_id,
        request_id=ticket.request_id,
        prefill=_Side(ticket.prefill_id, ticket.prefill_epoch),
        decode=_Side(ticket.decode_id, ticket.decode_epoch),
        exp=ticket.expires_at,
        prompt=ticket.prompt_digest,
        iat=ticket.issued_at,
        trace=ticket.traceparent,
        adapter=ticket.adapter,
    )
    return _jws.encode(
        msgspec.json.encode(claims),
        keys.signing_key,
        algorithm=_ALGORITHM,
        headers={"kid": keys.signing_id},
    )


def verify_ticket(token: str, keys: TicketKeys | bytes | str, *, now: float) -> Ticket:
    """Returns the ticket of a token that this cluster signed and that is valid at `now`; the ticket
    contains the token.

    Raises TicketInvalid if it was not signed with one of the keys, is damaged, or was signed later
    than `now`; TicketExpired (a TicketInvalid) if it has expired. Clocks may differ by
    CLOCK_LEEWAY.
    """
    keys = as_ticket_keys(keys)
    if len(token) > _MAX_LENGTH:
        raise TicketInvalid(
            f"the ticket has {len(token)} characters; a real one has at most {_MAX_LENGTH}"
        )
    try:
        payload = jwt.decode(
            token,
            keys.find(jwt.get_unverified_header(token).get("kid")),
            algorithms=[_ALGORITHM],
            issuer=_ISSUER,
            # Compared below, as PyJWT would cut off the fraction of a second.
            options={"verify_exp": False, "verify_iat": False},
        )
        claims = msgspec.convert(payload, _Claims)
    except (jwt.PyJWTError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise TicketInvalid(
            f"the ticket cannot be trusted ({error}); give every worker and the control plane the "
            "same cluster key or ticket keys"
        ) from error
    ticket = Ticket(
        transfer_id=claims.jti,
        request_id=claims.request_id,
        prefill_id=claims.prefill.id,
        prefill_epoch=claims.prefill.epoch,
        decode_id=claims.decode.id,
        decode_epoch=claims.decode.epoch,
        expires_at=claims.exp,
        prompt_digest=claims.prompt,
        issued_at=claims.iat,
        traceparent=claims.trace,
        adapter=claims.adapter,
        token=token,
    )
    _require_current(ticket, now)
    return ticket


def _require_current(ticket: Ticket, now: float) -> None:
    """Raises TicketInvalid and TicketExpired."""
    what, issued = f"the ticket of transfer {ticket.transfer_id}", ticket.issued_at
    ahead = issued - now
    if ahead > CLOCK_LEEWAY:
        raise TicketInvalid(
            f"{what} was signed at {as_text(issued)} by its signer's clock, and by the clock of "
            f"this host it is {as_text(now)}: they differ by at least {ahead:.1f} s; synchronise "
            "the clocks of the hosts (NTP)"
        )
    if now < ticket.good_until:  # false for NaN
        return
    said = f"{what} expired {now - ticket.expires_at:.1f} s ago"
    if not issued:
        raise TicketExpired(f"{said}; send the request again for a new one")
    raise TicketExpired(
        f"{said}: it was signed at {as_text(issued)} by its signer's clock, for "
        f"{ticket.expires_at - issued:g} s, and by the clock of this host it is {as_text(now)}. "
        f"If the request is not {now - issued:.0f} s old, these clocks differ: synchronise them "
        "(NTP). Otherwise send the request again for a new ticket"
    )


def as_ticket_keys(keys: TicketKeys | bytes | str) -> TicketKeys:
    """Returns the keys, or the one that is derived from a cluster key."""
    return keys if isinstance(keys, TicketKeys) else derived_ticket_keys(keys)


def _hmac(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, purpose, hashlib.sha256).digest()
