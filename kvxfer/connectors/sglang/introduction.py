"""The introduction of a prefill instance to decode instances, signed with the ticket keys.

SGLang's decode servers get a host and a port from their client, and ask there. Any program may
answer: only the cluster's signature proves that it is a prefill instance of the cluster.
"""

from __future__ import annotations

from typing import Final

import jwt
import msgspec

from kvxfer.errors import InvalidArgument, TicketInvalid
from kvxfer.ticket import TicketKeys

MAX_LENGTH: Final = 4096

_ALGORITHM: Final = "HS256"
_ISSUER: Final = "kvxfer sglang prefill"  # differs from that of tickets


class Introduction(msgspec.Struct, frozen=True):
    """A prefill instance. `epoch` grows with each start."""

    instance_id: str
    epoch: int
    engine_address: str
    model: str
    kv_dtype: str
    page_size: int
    metadata_bytes: int
    pools: str = ""
    """Buffers, if there are others than K and V in pages of one size."""
    # SGLang reads these.
    dp_size: int = 1
    follow_bootstrap_room: bool = False

    def require_like(
        self, model: str, kv_dtype: str, page_size: int, metadata_bytes: int, pools: str = ""
    ) -> None:
        """Raises InvalidArgument if decode was started with other settings."""
        for what, theirs, ours in (
            ("--served-model-name", self.model, model),
            ("--kv-cache-dtype and --dtype", self.kv_dtype, kv_dtype),
            ("--page-size", self.page_size, page_size),
            ("bytes of metadata for a request", self.metadata_bytes, metadata_bytes),
            ("pools (buffers x bytes of an item)", self.pools, pools),
        ):
            if theirs != ours:
                raise InvalidArgument(
                    f"{what}: {theirs!r} on prefill {self.instance_id!r}, {ours!r} here; start "
                    "both sides with the same"
                )


class _Claims(msgspec.Struct, frozen=True):
    iss: str
    about: Introduction


def sign_introduction(about: Introduction, keys: TicketKeys) -> str:
    claims = msgspec.to_builtins(_Claims(_ISSUER, about))
    return jwt.encode(
        claims, keys.signing_key, algorithm=_ALGORITHM, headers={"kid": keys.signing_id}
    )


def verify_introduction(token: str, keys: TicketKeys, where: str) -> Introduction:
    """Returns a token's introduction. Raises TicketInvalid if the cluster has not signed it."""
    try:
        if len(token) > MAX_LENGTH:
            raise ValueError(f"it has more than {MAX_LENGTH} characters")
        payload = jwt.decode(
            token,
            keys.find(jwt.get_unverified_header(token).get("kid"), "the introduction"),
            algorithms=[_ALGORITHM],
            issuer=_ISSUER,
        )
        return msgspec.convert(payload, _Claims).about
    except (jwt.PyJWTError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise TicketInvalid(
            f"the introduction of {where} cannot be trusted ({error}); is it a prefill server "
            "with the transfer backend kvxfer and the same cluster key?"
        ) from error
