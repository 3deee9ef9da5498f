"""The messages between two KV endpoints: frozen typed values as tagged msgpack.

The engine keeps their order per peer. Every message about a transfer names it. Writes are *not*
ordered with messages: DONE carries the total, and the count decides.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from kvxfer.errors import ProtocolError
from kvxfer.kv_versions import Versions
from kvxfer.layout import KvLayout
from kvxfer.model_identity import ModelIdentity
from kvxfer.record import Record, at_api
from kvxfer.transfers import TransferId
from kvxfer.unreadable import UNREADABLE

# A message of the engine is at most 1 MiB; this leaves room for the rest of DONE.
MAX_TAIL_BYTES: Final = (1 << 20) - 1024

Total: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Both directions: sent when two engines meet, and again with a new epoch or model.

    `version` and `newest`: the oldest and the newest version that the sender speaks; version 7
    sends only `version`. `block_strides`: bytes from block to block, of each part of each layer.
    `permutes`: the sender can reorder the heads of its blocks after they have arrived. `checksums`:
    it wants a checksum with every DONE. `model`: the model of its KV cache; absent in version 7.
    """

    version: int
    instance_id: str
    epoch: int
    layout: KvLayout
    num_blocks: int
    block_strides: tuple[tuple[int, ...], ...]
    permutes: bool
    checksums: bool = False
    newest: int = 0
    model: ModelIdentity | None = None

    @property
    def versions(self) -> Versions:
        return self.version, max(self.version, self.newest)


class Offer(Record, frozen=True, tag="offer"):
    """decode → prefill: write into these blocks, with this immediate, within this time."""

    transfer_id: TransferId
    ticket: Annotated[
        str, at_api(max_length=4096), msgspec.Meta(examples=["eyJhbGciOiJIUzI1NiIs…"])
    ]
    blocks: Annotated[bytes, msgspec.Meta(examples=["AwAAAAcAAAA="])]
    """Decode's block table, little-endian int32, with a row for each KV cache group of the layout;
    the same for every prefill rank."""
    grants: Annotated[
        tuple[bytes, ...],
        at_api(max_length=65_536),
        msgspec.Meta(examples=[["a3Z4bXIxMjM0NTY3OA=="]]),
    ]
    """An MR descriptor for each part of each layer that the plan of the two ranks writes to, in
    order. It opens the plane from the lowest block of the layer's group to the end of its highest,
    to this prefill rank and for this transfer only."""
    imm: Annotated[int, at_api(ge=0, lt=1 << 32), msgspec.Meta(examples=[65537])]
    """Immediate that decode counts."""
    lease_seconds: Annotated[float, at_api(gt=0), msgspec.Meta(examples=[58.7])]
    first_block: Annotated[int, at_api(ge=0, lt=1 << 31)] = 0
    """First block of the prompt in the table; decode already has those before it."""
    # Left out without an adapter: then the OFFER is as in version 7, also when it is signed.
    adapter: Annotated[str | msgspec.UnsetType, at_api(max_length=256)] = msgspec.UNSET
    """Digest of the LoRA that decode computes with, if any; version 7 does not send it."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """decode → prefill: no offer will come under this ticket; free the blocks."""

    transfer_id: str
    ticket: str
    reason: str


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """decode → prefill: the request waits here for blocks; an offer follows. Prefill keeps its
    blocks for `lease_seconds` from now, at most until the ticket expires."""

    transfer_id: str
    ticket: str
    lease_seconds: float


class Expect(msgspec.Struct, frozen=True, tag="expect"):
    """prefill → decode, in a brokered handshake: I wait for your offer, over this connection."""

    transfer_id: str
    ticket: str


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """prefill → decode: the offer and a prefill request have met; writes follow."""

    transfer_id: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """prefill → decode: no write was or will be made; `code` is one of kvxfer.errors."""

    transfer_id: str
    code: str
    reason: str


class Checksum(msgspec.Struct, frozen=True):
    """The checksum of what a prefill rank has written of a prompt, which has `blocks` blocks at
    prefill; see kvxfer.kv.checksum."""

    value: int
    blocks: int


class Done(msgspec.Struct, frozen=True, tag="done"):
    """prefill → decode: all writes were posted; this rank's part of the cache is complete when
    their immediates, `total` in all, have arrived. It has a checksum if a side wants one."""

    transfer_id: str
    total: Total
    tail: bytes
    checksum: Checksum | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Either direction: the sender cancels the transfer.

    Prefill sends it when no write is under way any more; decode's is answered by Cancelled.
    """

    transfer_id: str
    reason: str


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled"):
    """prefill → decode: no write is under way any more; writes with `total` immediates were
    delivered."""

    transfer_id: str
    total: Total


Message: TypeAlias = (
    Hello | Offer | Release | Keep | Expect | Accepted | Refused | Done | Cancel | Cancelled
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Message]] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises ProtocolError for anything that is not one of the messages above."""
    try:
        return _decoder.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(
            f"a message of {len(data)} bytes is not of the KV protocol ({error}); "
            "run the same version of kvxfer on both sides"
        ) from None
