"""The data that prefill sends to decode along with DONE."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvxfer.errors import InvalidArgument, ProtocolError
from kvxfer.prompt_digest import prompt_digest
from kvxfer.unreadable import UNREADABLE


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a prefill. `computed_at` is in seconds since the Unix epoch."""

    model: str
    prompt_digest: bytes
    first_token: int
    prefill_seconds: float
    computed_at: float
    weights_version: int = 0
    """The version that computed the KV cache and the first token."""


def encode_tail(tail: Tail) -> bytes:
    return msgspec.msgpack.encode(tail)


def decode_tail(data: bytes, *, model: str, tokens: Sequence[int]) -> Tail:
    """Returns the tail of a transfer for `tokens`.

    Raises:
        ProtocolError: it is not a tail.
        InvalidArgument: prefill computed another prompt, or ran another model.
    """
    try:
        tail = msgspec.msgpack.decode(data, type=Tail)
    except UNREADABLE as error:
        raise ProtocolError(
            f"the tail of a transfer cannot be read ({error}); run the same version of kvxfer on "
            "both sides"
        ) from None
    if tail.model != model:
        raise InvalidArgument(
            f"prefill ran the model {tail.model!r}, this worker runs {model!r}; start both with "
            "the same model"
        )
    if tail.prompt_digest != prompt_digest(tokens):
        raise InvalidArgument(
            "prefill computed another prompt; send the same request to both workers"
        )
    return tail
