"""The messages between the ranks of a group: frozen typed values as tagged msgpack."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.errors import KvxferError, ProtocolError, by_code
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MOST_RANKS, MoeShape
from kvxfer.moe.view_messages import (
    Ask,
    Ended,
    Excluded,
    Flush,
    Rank,
    Ready,
    View,
    Wait,
    Yield,
)
from kvxfer.unreadable import UNREADABLE

VERSION: Final = 2
"""2: refused steps in Flush and View, taken places in Members."""

Address: TypeAlias = Annotated[str, Meta(max_length=256)]


# --- set-up of a pair: Hello, Terms, Welcome, in this order and both ways


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a rank, unless it sends Join or Ask.

    socket: the abstract unix socket that takes file descriptors of ranks on its host. secret: has
    to accompany the descriptors of the recipient.
    """

    rank: Rank
    shape: MoeShape
    placement: Placement
    address: Address
    socket: Annotated[str, Meta(max_length=100)]
    secret: Annotated[bytes, Meta(min_length=16, max_length=16)]
    version: int = VERSION


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The reason why no group forms with the recipient."""

    code: str
    text: str

    def error(self) -> KvxferError:
        try:
            return by_code(self.code)(self.text)
        except TypeError:  # an error that takes more than a text
            return KvxferError(f"{self.text} ({self.code})")


class Terms(msgspec.Struct, frozen=True, tag="terms"):
    """The terms for the recipient's writes, from `open_remote()`; None if the rank's memory waits
    at the recipient's socket."""

    remote: bytes | None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """A notice that this side of the pair is set up."""


# --- hosts


class Near(msgspec.Struct, frozen=True, tag="near"):
    """The members on the rank's host, whose memory it reads: rows for several of them may go to one
    of them."""

    ranks: Annotated[frozenset[Rank], Meta(max_length=MOST_RANKS)]


# --- the end


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A notice that the rank leaves after `steps` steps; it waits for Farewell, or Leaving."""

    steps: Annotated[int, Meta(ge=0, lt=1 << 40)]


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """A notice that the sender needs nothing more from the recipient."""


# --- newcomers


class Join(msgspec.Struct, frozen=True, tag="join"):
    """newcomer → any member: who are the members?"""

    rank: Rank


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The answer to Join: the addresses of the members, by rank; none if the newcomer's rank is
    still a member. taken: the sender has not lost that member."""

    addresses: Annotated[dict[Rank, Address], Meta(max_length=MOST_RANKS)]
    taken: bool = False


Message: TypeAlias = (
    Hello
    | Refused
    | Terms
    | Welcome
    | Near
    | Leaving
    | Farewell
    | Join
    | Members
    | Flush
    | View
    | Ask
    | Excluded
    | Yield
    | Wait
    | Ended
    | Ready
)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _ENCODER.encode(message)


def decode(data: bytes, name: str) -> Message:
    """Decodes a message of the peer `name`. Raises ProtocolError."""
    try:
        return _DECODER.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"{name!r} sent a message that cannot be read: {error}") from error
