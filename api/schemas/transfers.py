"""Bodies about pairs and transfers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from kvxfer import transfers as records
from kvxfer.api.schemas.instances import BlockHash, Epoch, InstanceId, PositiveCount
from kvxfer.layout import Part
from kvxfer.prefix_hashes import MAX_HASHES_PER_REQUEST, from_text

TransferId = Annotated[str, Field(examples=["3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a"])]

_PREFILL: JsonDict = {
    "instance_id": "prefill-0",
    "epoch": 1795046400000001,
    "engine_address": "kvx://10.0.0.5:7400/9f1c2a7be0d44c5e8a3b6d7f01e2c3d4",
    "http_address": "http://10.0.0.5:8000",
    "rank_addresses": [],
    "bootstrap_address": "",
}
_DECODE: JsonDict = {
    "instance_id": "decode-0",
    "epoch": 1795046400000002,
    "engine_address": "kvx://10.0.0.6:7400/0c7be19dd2f84e0b9a51c3f6e8d7b2a4",
    "http_address": "http://10.0.0.6:8000",
    "rank_addresses": [],
    "bootstrap_address": "",
}
_TRANSFER: JsonDict = {
    "transfer_id": "3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a",
    "request_id": "cmpl-7",
    "model": "llama-3.2-3b",
    "prompt_tokens": 1900,
    "prefill": _PREFILL,
    "decode": _DECODE,
    "prefill_blocks": 119,
    "decode_blocks": 119,
    "created_at": 1795046460.0,
    "expires_at": 1795046520.0,
    "score": None,
}
_SCORE: JsonDict = {
    "cost": 4.2,
    "prefill": {"running": 2.0, "waiting": 1.0, "reserved": 0.0, "occupancy": 0.0},
    "decode": {"running": 1.0, "waiting": 0.0, "reserved": 0.0, "occupancy": 0.0},
    "pair": {"distance": 1.0, "fabric": 0.0, "prefix": -0.8},
    "distance": 1,
    "prefix_tokens": 1600,
}


class Party(BaseModel):
    """One side of a pair, and where to reach it."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_PREFILL]})

    instance_id: InstanceId
    epoch: Epoch
    engine_address: str
    http_address: str
    rank_addresses: list[str] = Field(
        [], description="The engine of each rank, where more than one is registered."
    )
    bootstrap_address: str = Field(
        "", description="Where the bootstrap server of a prefill instance of SGLang listens."
    )


class HandshakeRequest(BaseModel):
    """The pair to compare."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"prefill_id": "prefill-0", "decode_id": "decode-0"}]},
    )

    prefill_id: InstanceId
    decode_id: InstanceId


class PlannedCopy(BaseModel):
    """What of one cycle of one layer moves from a part of prefill's to a part of decode's."""

    model_config = ConfigDict(from_attributes=True)

    prefill_part: Part
    decode_part: Part
    runs: int = Field(description="Ranges of contiguous bytes.")
    bytes: int = Field(description="Over all runs.")


class PlannedLayer(BaseModel):
    """Which layer goes where; each side counts from 0 on its own rank."""

    model_config = ConfigDict(from_attributes=True)

    prefill_layer: int
    decode_layer: int
    copies: list[PlannedCopy]


class PlanSummary(BaseModel):
    """What moves between one rank of each side, per cycle: the fewest tokens that fill whole blocks
    on both."""

    model_config = ConfigDict(from_attributes=True)

    prefill_rank: int
    decode_rank: int
    layers: int
    cycle_tokens: int
    runs_per_cycle: int = Field(
        description="Ranges of contiguous bytes that one cycle takes over all layers."
    )
    bytes_per_cycle: int = Field(description="Bytes that one cycle takes over all layers.")
    prefill_block_size: int = Field(description="Tokens per block.")
    decode_block_size: int = Field(description="Tokens per block.")
    permutes: bool = Field(
        description="Decode puts the heads of its blocks into its own order when they are there."
    )
    layer_map: list[PlannedLayer] = Field(
        description="One for each of `layers`, in the order in which they move."
    )


class RankPair(BaseModel):
    """A rank of prefill that writes to a rank of decode."""

    model_config = ConfigDict(from_attributes=True)

    prefill_rank: int
    decode_rank: int
    layers: int
    bytes_per_token: int


class Handshake(BaseModel):
    """A pair of instances that can transfer to each other."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={
            "examples": [
                {
                    "prefill": _PREFILL,
                    "decode": _DECODE,
                    "fabrics": ["tcp"],
                    "plan": {
                        "prefill_rank": 0,
                        "decode_rank": 0,
                        "layers": 1,
                        "cycle_tokens": 16,
                        "runs_per_cycle": 2,
                        "bytes_per_cycle": 65536,
                        "prefill_block_size": 16,
                        "decode_block_size": 16,
                        "permutes": False,
                        "layer_map": [
                            {
                                "prefill_layer": 0,
                                "decode_layer": 0,
                                "copies": [
                                    {
                                        "prefill_part": part,
                                        "decode_part": part,
                                        "runs": 1,
                                        "bytes": 32768,
                                    }
                                    for part in ("K", "V")
                                ],
                            }
                        ],
                    },
                    "rank_pairs": [
                        {
                            "prefill_rank": 0,
                            "decode_rank": 0,
                            "layers": 1,
                            "bytes_per_token": 4096,
                        }
                    ],
                }
            ]
        },
    )

    prefill: Party
    decode: Party
    fabrics: list[str] = Field(
        description="The fabrics that both have, in the order that prefill prefers."
    )
    plan: PlanSummary = Field(description="Between the ranks whose layouts are registered.")
    rank_pairs: list[RankPair] = Field(
        description="All ranks of both instances that transfer to each other."
    )


class TransferRequest(BaseModel):
    """A request that needs a prefill and a decode instance. Every member may be left out."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"request_id": "cmpl-7", "model": "llama-3.2-3b", "prompt_tokens": 1900}]
        },
    )

    request_id: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The router's name for the request; the transfer's id where it is left out.",
    )
    model: str | None = Field(None, min_length=1, max_length=256, description="Null: any model.")
    prompt_tokens: PositiveCount | None = Field(
        None,
        description="KV blocks for so many tokens are reserved on both sides; null reserves none.",
    )
    avoid: Annotated[tuple[InstanceId, ...], Field(max_length=64)] = Field(
        (),
        description=(
            "Instances that just failed this request: they are chosen only where their side has no "
            "other."
        ),
    )
    prefix_hashes: list[BlockHash] = Field(
        default_factory=list,
        max_length=MAX_HASHES_PER_REQUEST,
        description=(
            "Chain hashes of the prompt's beginning, in its order: prefill workers that published "
            "them are preferred."
        ),
    )
    tokens_per_hash: PositiveCount | None = Field(
        None, description="Null: the block size of the prefill instance."
    )
    explain: bool = Field(False, description="Whether to say in `score` why it is this pair.")

    def record(self) -> records.TransferRequest:
        return records.TransferRequest(
            request_id=self.request_id,
            model=self.model,
            prompt_tokens=self.prompt_tokens,
            avoid=self.avoid,
            prefix_hashes=from_text(self.prefix_hashes),
            tokens_per_hash=self.tokens_per_hash,
            explain=self.explain,
        )


class Score(BaseModel):
    """Why a pair was chosen: no other pair that was looked at had less cost."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_SCORE]})

    cost: float = Field(description="The sum of all parts; the unit is one request in a queue.")
    prefill: dict[str, float] = Field(description="What the load of the prefill instance costs.")
    decode: dict[str, float] = Field(description="What the load of the decode instance costs.")
    pair: dict[str, float] = Field(description="What the two are to each other.")
    distance: int = Field(
        description="0 on one NUMA node, 1 on one host, 2 in one rack, 3 in one zone, 4 beyond."
    )
    prefix_tokens: int = Field(
        description="Tokens of the prompt that prefill is taken to have in its cache."
    )


class Transfer(BaseModel):
    """A pair that is reserved for one request. Times are seconds since the Unix epoch."""

    model_config = ConfigDict(from_attributes=True, json_schema_extra={"examples": [_TRANSFER]})

    transfer_id: TransferId
    request_id: str
    model: str
    prompt_tokens: int | None
    prefill: Party
    decode: Party
    prefill_blocks: int = Field(description="KV blocks reserved at prefill.")
    decode_blocks: int = Field(description="KV blocks reserved at decode.")
    created_at: float
    expires_at: float = Field(
        description="From then on the ticket is void and the reservation is given back."
    )
    score: Score | None = Field(
        None, description="Why this pair; null where its request had no `explain`."
    )


class TransferList(BaseModel):
    model_config = ConfigDict(json_schema_extra={"examples": [{"transfers": [_TRANSFER]}]})

    transfers: list[Transfer]


class OpenedTransfer(Transfer):
    """A new transfer with the ticket that both workers ask for."""

    model_config = ConfigDict(
        from_attributes=True,
        json_schema_extra={"examples": [{**_TRANSFER, "ticket": "eyJhbGciOiJIUzI1NiIs…"}]},
    )

    ticket: str = Field(
        description="Signed proof of this transfer. Hand it to both workers, keep it out of logs."
    )
