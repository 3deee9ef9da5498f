"""What the control plane says of pairs: records that registry, REST API and client share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from kvxfer.instances import (
    BlockHash,
    EngineAddress,
    Epoch,
    HttpAddress,
    Instance,
    InstanceId,
    ModelName,
    PositiveCount,
    UnixTime,
)
from kvxfer.layout import Part
from kvxfer.model_identity import WeightsVersion
from kvxfer.prefix_hashes import MAX_HASHES_PER_REQUEST
from kvxfer.record import Record

TransferId: TypeAlias = Annotated[str, Meta(examples=["3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a"])]
TicketText: TypeAlias = Annotated[str, Meta(max_length=4096, examples=["eyJhbGciOiJIUzI1NiIs…"])]

MAX_WAIT_SECONDS: Final = 60.0
"""How long a request may be kept waiting for a pair."""

NOMINAL_PROMPT_TOKENS: Final = 2000
"""What a prompt of unknown length is taken to have."""

_RequestId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
_Costs: TypeAlias = Annotated[
    Mapping[str, float], Meta(examples=[{"running": 2.0, "waiting": 1.0}])
]


AloneBecause: TypeAlias = Annotated[str, Meta(max_length=64, examples=[""])]
_TransferName: TypeAlias = Annotated[
    TransferId, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")
]
_Tenant: TypeAlias = Annotated[str, Meta(max_length=256)]


class TransferRequest(Record, frozen=True, kw_only=True):
    """A request that needs a prefill and a decode instance, or one for both. Every member may be
    left out."""

    transfer_id: Annotated[
        _TransferName | None, Meta(examples=["3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a"])
    ] = None
    """The caller's name for the transfer, so that it may ask again where no answer came: letters,
    digits and . _ : -, at most 128 characters. The control plane makes one where it is left out."""
    request_id: Annotated[_RequestId | None, Meta(examples=["cmpl-7"])] = None
    """The router's own name for the request; the transfer's id where it is left out."""
    model: Annotated[ModelName | None, Meta(examples=["llama-3.2-3b"])] = None
    """None takes any model."""
    prompt_tokens: Annotated[PositiveCount | None, Meta(examples=[1900])] = None
    """KV blocks for so many tokens are reserved on both sides; None reserves none."""
    weights_version: Annotated[WeightsVersion | None, Meta(examples=[None])] = None
    """Only instances that serve this version of their weights; None takes any, the same on both
    sides."""
    avoid: Annotated[tuple[InstanceId, ...], Meta(max_length=64)] = ()
    """Instances that just failed this request: they are chosen only where their side has no
    other."""
    prefix_hashes: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_REQUEST)] = ()
    """Chain hashes of the prompt's beginning, in its order: prefill instances that published them
    are preferred."""
    tokens_per_hash: PositiveCount | None = None
    """Tokens from one of them to the next; None is the block size of the prefill instance."""
    explain: bool = False
    """Whether to say in `score` why it is this pair."""
    aggregated: bool = False
    """Whether one instance has to serve the whole request, without a transfer of its KV cache: the
    answer names it on both sides, and has no ticket."""
    or_aggregated: bool = False
    """Whether one instance may serve the whole request where no pair of ready instances could, with
    or without room, or where decode lacks little of the prompt (the pairing policy's
    `alone_tokens`): the answer is as for `aggregated`."""
    wait_seconds: Annotated[float, Meta(ge=0, le=MAX_WAIT_SECONDS)] = 0.0
    """Where no pair has room the request waits its turn for so long; with 0 it is refused, also
    where others wait."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Of the requests that wait those of the lowest number are first, as in vLLM."""
    tenant: Annotated[_Tenant | None, Meta(examples=[None])] = None
    """For whom it is: the tenants that requests wait for take turns, by the weights of the pairing
    policy. Those without a weight are one."""


class HandshakeRequest(Record, frozen=True, kw_only=True):
    """The pair to compare."""

    prefill_id: InstanceId
    decode_id: Annotated[InstanceId, Meta(examples=["decode-0"])]


class Party(Record, frozen=True, kw_only=True):
    """One side of a pair, and where to reach it."""

    instance_id: InstanceId
    epoch: Epoch
    engine_address: EngineAddress
    http_address: HttpAddress
    rank_addresses: tuple[EngineAddress, ...] = ()
    """The engine address of each rank, where it has registered more than one."""
    bootstrap_address: str = ""
    """Where the bootstrap server of a prefill instance of SGLang listens, `HOST:PORT`."""

    @classmethod
    def of(cls, instance: Instance) -> Party:
        return cls(
            instance_id=instance.instance_id,
            epoch=instance.epoch,
            engine_address=instance.engine_address,
            http_address=instance.http_address,
            rank_addresses=instance.rank_addresses,
            bootstrap_address=instance.bootstrap_address,
        )


class Score(Record, frozen=True, kw_only=True):
    """Why a pair was chosen: no other pair that was looked at had less cost."""

    cost: float
    """The sum of all parts; the unit is one request in a queue."""
    prefill: _Costs
    """What the load of the prefill instance costs, by its parts."""
    decode: _Costs
    """What the load of the decode instance costs."""
    pair: Annotated[Mapping[str, float], Meta(examples=[{"distance": 1.0, "prefix": -0.8}])]
    """What the two are to each other."""
    distance: int
    """0 on one NUMA node, 1 on one host, 2 in one rack, 3 in one zone, 4 beyond."""
    prefix_tokens: int
    """Tokens of the prompt that prefill is taken to have in its cache."""
    decode_prefix_tokens: int = 0
    """The same of decode."""


class Transfer(Record, frozen=True, kw_only=True):
    """A pair that is reserved for one request, or one instance that is named on both sides. Times
    are seconds since the Unix epoch."""

    transfer_id: TransferId
    request_id: Annotated[str, Meta(examples=["cmpl-7"])]
    model: Annotated[str, Meta(examples=["llama-3.2-3b"])]
    prompt_tokens: Annotated[int | None, Meta(examples=[1900])]
    prefill: Party
    decode: Party
    prefill_blocks: Annotated[int, Meta(examples=[119])]
    """KV blocks reserved at prefill."""
    decode_blocks: Annotated[int, Meta(examples=[119])]
    """KV blocks reserved at decode."""
    created_at: UnixTime
    expires_at: Annotated[float, Meta(examples=[1795046520.0])]
    """From then on the ticket is void and the reservation is given back."""
    cached_tokens: int = 0
    """Tokens of the prompt that prefill was taken to have in its cache."""
    alone_because: AloneBecause = ""
    """Why one instance serves a request that may have a pair, too: `no-pair` is ready, or decode
    lacks little of a `short-prompt`."""
    score: Score | None = None
    """Why this pair; None where its request had no `explain`."""

    @property
    def tokens_to_compute(self) -> int:
        """At prefill."""
        if self.prompt_tokens is None:
            return NOMINAL_PROMPT_TOKENS
        return max(self.prompt_tokens - self.cached_tokens, 0)

    @property
    def aggregated(self) -> bool:
        """Whether one instance serves the whole request."""
        return self.prefill.instance_id == self.decode.instance_id

    @property
    def sides(self) -> tuple[tuple[Party, int], ...]:
        """Its instances, and the KV blocks that it reserves on each: one where it is aggregated."""
        prefill, decode = (self.prefill, self.prefill_blocks), (self.decode, self.decode_blocks)
        return (prefill,) if self.aggregated else (prefill, decode)

    def blocks_on(self, instance_id: str) -> int:
        """KV blocks that it reserves on one of its instances."""
        return (
            self.prefill_blocks if instance_id == self.prefill.instance_id else self.decode_blocks
        )


class TransferList(Record, frozen=True, kw_only=True):
    """Open transfers, the oldest first, without their tickets."""

    transfers: tuple[Transfer, ...]


class OpenedTransfer(Transfer, frozen=True, kw_only=True):
    """A new transfer with the ticket that both workers ask for."""

    ticket: TicketText
    """Signed proof of this transfer. Hand it to both workers, keep it out of logs. Empty where one
    instance serves the request alone."""

    @classmethod
    def of(cls, transfer: Transfer, ticket: str) -> OpenedTransfer:
        told = {name: getattr(transfer, name) for name in Transfer.__struct_fields__}
        return cls(**told, ticket=ticket)


class PlannedCopy(Record, frozen=True, kw_only=True):
    """What of one cycle of one layer moves from a part of prefill's to a part of decode's."""

    prefill_part: Part
    decode_part: Part
    runs: int
    """Ranges of contiguous bytes."""
    bytes: int
    """Over all runs."""


class PlannedLayer(Record, frozen=True, kw_only=True):
    """Which layer goes where; each side counts from 0 on its own rank."""

    prefill_layer: int
    decode_layer: int
    copies: tuple[PlannedCopy, ...]


class PlanSummary(Record, frozen=True, kw_only=True):
    """What moves between one rank of each side, per cycle: the fewest tokens that fill whole blocks
    on both."""

    prefill_rank: int
    decode_rank: int
    layers: int
    cycle_tokens: int
    runs_per_cycle: int
    """Ranges of contiguous bytes that one cycle takes over all layers."""
    bytes_per_cycle: int
    """Bytes that one cycle takes over all layers."""
    prefill_block_size: int
    """Tokens per block."""
    decode_block_size: int
    """Tokens per block."""
    permutes: bool
    """Whether decode puts the heads of its blocks into its own order after they have arrived."""
    layer_map: tuple[PlannedLayer, ...]
    """One for each of `layers`, in the order in which they move."""


class RankPair(Record, frozen=True, kw_only=True):
    """A rank of prefill that writes to a rank of decode."""

    prefill_rank: int
    decode_rank: int
    layers: int
    bytes_per_token: int


class Handshake(Record, frozen=True, kw_only=True):
    """A pair of instances that can transfer to each other."""

    prefill: Party
    decode: Party
    fabrics: tuple[Annotated[str, Meta(examples=["tcp"])], ...]
    """The fabrics that both have, in the order that prefill prefers."""
    plan: PlanSummary
    """Between the ranks whose layouts are registered."""
    rank_pairs: tuple[RankPair, ...]
    """All ranks of both instances that transfer to each other."""
