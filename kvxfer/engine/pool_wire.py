"""The wire format of a receive pool: offers, and headers of messages.

A slot is a header, then the payload. Both come by one-sided writes, with different immediates and
in any order. A header is one write, so its counter alone shows that it has arrived. The header says
how many immediates the payload takes, which only the sender knows.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec

from kvxfer.errors import InvalidArgument
from kvxfer.unreadable import UNREADABLE

HEADER_BYTES: Final = 64  # a cache line, so that payloads are aligned
_HEADER: Final = struct.Struct("<QII")


class Header(NamedTuple):
    """The header of a message. length: bytes of the payload. immediates: immediates of the payload.
    credit: the immediate that gives the slot back to the sender."""

    length: int
    immediates: int
    credit: int

    def pack_into(self, view: memoryview) -> None:
        _HEADER.pack_into(view, 0, *self)

    @classmethod
    def unpack(cls, view: memoryview) -> Header:
        return cls(*_HEADER.unpack_from(view))


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Imm: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class SlotOffer(msgspec.Struct, frozen=True, array_like=True):
    """A lent slot: its offset in the region, and the immediates of its header and its payload."""

    offset: _Size
    header_imm: _Imm
    payload_imm: _Imm


class PoolOffer(msgspec.Struct, frozen=True, array_like=True, tag="kvxfer-receive-slots"):
    """Slots lent to one peer. region: a descriptor."""

    region: bytes
    slot_bytes: _Size
    slots: tuple[SlotOffer, ...]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(PoolOffer)


def encode(offer: PoolOffer) -> bytes:
    return _encoder.encode(offer)


def decode(data: bytes) -> PoolOffer:
    """Raises InvalidArgument for anything but the bytes of ReceivePool.offer()."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise InvalidArgument(f"these are not the bytes of ReceivePool.offer(): {error}") from None
