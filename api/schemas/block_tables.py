"""Bodies about the block tables that go by way of the control plane."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvxfer.api.schemas.instances import Epoch, InstanceId
from kvxfer.api.schemas.transfers import TransferId
from kvxfer.kv import block_table as records

_TABLE: JsonDict = {
    "offer": {
        "type": "offer",
        "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
        "ticket": "eyJhbGciOiJIUzI1NiIs…",
        "blocks": "AwAAAAcAAAA=",
        "grants": ["a3Z4bXIxMjM0NTY3OA=="],
        "imm": 65537,
        "lease_seconds": 58.7,
        "first_block": 0,
    },
    "decode_id": "decode-0",
    "decode_epoch": 1795046400000002,
    "kid": "8c1f02b7d94e6a35",
    "mac": "q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k=",
}


def _is_base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"it is no base64 (RFC 4648): {error}") from None
    return text


Base64 = Annotated[
    str, AfterValidator(_is_base64), Field(json_schema_extra={"contentEncoding": "base64"})
]


class Offer(BaseModel):
    """What decode offers; between engines the same goes as a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["offer"]
    transfer_id: TransferId
    ticket: str = Field(max_length=4096)
    blocks: Base64 = Field(description="Block ids of decode's pool, little-endian int32.")
    grants: list[Base64] = Field(
        max_length=65_536, description="An MR descriptor for each part of each layer, in order."
    )
    imm: int = Field(ge=0, lt=1 << 32, description="The immediate that decode counts.")
    lease_seconds: float = Field(gt=0, allow_inf_nan=False)
    first_block: int = Field(
        0, ge=0, lt=1 << 31, description="The block of the prompt that the table begins with."
    )
    adapter: str | None = Field(
        None, max_length=256, description="Digest of the LoRA that decode computes with, if any."
    )


class BlockTable(BaseModel):
    """An offer, who made it, and a signature that none but the workers can make."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [_TABLE]})

    offer: Offer
    decode_id: InstanceId
    decode_epoch: Epoch
    kid: str = Field(max_length=64, description="Which of the ticket keys signed it.")
    mac: Base64 = Field(
        description="HMAC-SHA256 over the msgpack of offer, decode_id and decode_epoch."
    )

    def record(self) -> records.BlockTable:
        return msgspec.convert(self.model_dump(exclude_none=True), records.BlockTable)
