"""Records of pairs and transfers, shared by registry, REST API and client."""

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
"""The longest that a request may wait for a pair, in seconds."""

NOMINAL_PROMPT_TOKENS: Final = 2000
"""The assumed tokens of a prompt of unknown length."""

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
    """A request that needs a prefill and a decode instance, or one for both. Every member is
    optional."""

    transfer_id: Annotated[
        _TransferName | None, Meta(examples=["3f0d1f6c5c0b4f6c9d3c6a6f2f1e8b7a"])
    ] = None
    """The caller's name for the transfer: letters, digits and . _ : -, at most 128 characters. With
    it a caller that got no answer may ask again. If left out, the control plane makes one."""
    request_id: Annotated[_RequestId | None, Meta(examples=["cmpl-7"])] = None
    """The router's name for the request; if left out, the transfer's id."""
    model: Annotated[ModelName | None, Meta(examples=["llama-3.2-3b"])] = None
    """Model to serve the request; None takes any."""
    prompt_tokens: Annotated[PositiveCount | None, Meta(examples=[1900])] = None
    """Tokens of the prompt. KV blocks for them are reserved on both sides; None reserves none."""
    output_tokens: Annotated[PositiveCount | None, Meta(examples=[250])] = None
    """Expected tokens of the answer. KV blocks for them are reserved too where the answer is
    computed, at most as many as the largest instance has."""
    weights_version: Annotated[WeightsVersion | None, Meta(examples=[None])] = None
    """Version of the weights that both instances have to serve; None takes any version, the same on
    both sides."""
    avoid: Annotated[tuple[InstanceId, ...], Meta(max_length=64)] = ()
    """Instances that just failed this request. They are chosen only if their side has no other."""
    prefix_hashes: Annotated[tuple[BlockHash, ...], Meta(max_length=MAX_HASHES_PER_REQUEST)] = ()
    """Chain hashes of the prompt's beginning, in the order of its tokens. Instances that published
    them are preferred."""
    tokens_per_hash: PositiveCount | None = None
    """Tokens from one hash to the next; None stands for the block size of the instance."""
    explain: bool = False
    """Whether the answer explains the choice in `score`."""
    aggregated: bool = False
    """Whether one instance has to serve the whole request, without a transfer of its KV cache. The
    answer then names it on both sides and has no ticket."""
    or_aggregated: bool = False
    """Whether one instance may serve the whole request if no pair of ready instances could, with or
    without room, or if decode lacks few tokens of the prompt (`alone_tokens` of the pairing
    policy). The answer is then as for `aggregated`."""
    wait_seconds: Annotated[float, Meta(ge=0, le=MAX_WAIT_SECONDS)] = 0.0
    """Seconds that the request waits its turn if no pair has room. With 0 it is refused instead,
    also if other requests wait."""
    waited_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds that the request has already waited, at the router or for a worker that then had no
    room. Its place in the queue is as if it had come that much earlier."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Priority among the requests that wait: the lowest number is first, as in vLLM."""
    tenant: Annotated[_Tenant | None, Meta(examples=[None])] = None
    """Tenant of the request. Tenants whose requests wait take turns, by their weights in the
    pairing policy. All tenants without a weight count as one."""


class HandshakeRequest(Record, frozen=True, kw_only=True):
    """The pair to compare."""

    prefill_id: InstanceId
    decode_id: Annotated[InstanceId, Meta(examples=["decode-0"])]


class Party(Record, frozen=True, kw_only=True):
    """One side of a pair and its addresses."""

    instance_id: InstanceId
    epoch: Epoch
    engine_address: EngineAddress
    http_address: HttpAddress
    rank_addresses: tuple[EngineAddress, ...] = ()
    """Engine address of each rank, if more than one is registered."""
    bootstrap_address: str = ""
    """Address of the bootstrap server of an SGLang prefill instance, `HOST:PORT`."""

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
    """The cost of the chosen pair. No other pair that was considered costs less."""

    cost: float
    """Sum of all parts. The unit is one request in a queue."""
    prefill: _Costs
    """Cost of the prefill instance's load, by part."""
    decode: _Costs
    """Cost of the decode instance's load, less the value of its cached prefix, by part."""
    pair: Annotated[Mapping[str, float], Meta(examples=[{"distance": 1.0, "prefix": -0.8}])]
    """Cost of the distance and the fabric, less the value of prefill's cached prefix, by part."""
    distance: int
    """Distance of the two: 0 on one NUMA node, 1 on one host, 2 in one rack, 3 in one zone, 4
    beyond."""
    prefix_tokens: int
    """Tokens of the prompt assumed to be in prefill's cache."""
    decode_prefix_tokens: int = 0
    """Tokens of the prompt assumed to be in decode's cache."""


class Transfer(Record, frozen=True, kw_only=True):
    """A pair that is reserved for one request, or one instance named on both sides. Times are
    seconds since the Unix epoch."""

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
    """Time at which the ticket becomes void and the reservation ends."""
    cached_tokens: int = 0
    """Tokens of the prompt that were assumed to be in prefill's cache."""
    alone_because: AloneBecause = ""
    """Reason that one instance serves an `or_aggregated` request: `no-pair` (no pair is ready) or
    `short-prompt` (decode lacks few tokens of the prompt); otherwise empty."""
    score: Score | None = None
    """Cost of this pair; None if the request had no `explain`."""

    @property
    def tokens_to_compute(self) -> int:
        """The tokens that prefill has to compute."""
        if self.prompt_tokens is None:
            return NOMINAL_PROMPT_TOKENS
        return max(self.prompt_tokens - self.cached_tokens, 0)

    @property
    def aggregated(self) -> bool:
        """Whether one instance serves the whole request."""
        return self.prefill.instance_id == self.decode.instance_id

    @property
    def sides(self) -> tuple[tuple[Party, int], ...]:
        """The instances with the KV blocks reserved on each; only one if the transfer is
        aggregated."""
        prefill, decode = (self.prefill, self.prefill_blocks), (self.decode, self.decode_blocks)
        return (prefill,) if self.aggregated else (prefill, decode)

    def blocks_on(self, instance_id: str) -> int:
        """Returns the KV blocks reserved on one of its instances."""
        return (
            self.prefill_blocks if instance_id == self.prefill.instance_id else self.decode_blocks
        )


class TransferList(Record, frozen=True, kw_only=True):
    """Open transfers, the oldest first, without their tickets."""

    transfers: tuple[Transfer, ...]


class OpenedTransfer(Transfer, frozen=True, kw_only=True):
    """A new transfer with the ticket that both workers require."""

    ticket: TicketText
    """Signed permission for this transfer. Pass it to both workers and keep it out of logs. Empty
    if one instance serves the request alone."""

    @classmethod
    def of(cls, transfer: Transfer, ticket: str) -> OpenedTransfer:
        told = {name: getattr(transfer, name) for name in Transfer.__struct_fields__}
        return cls(**told, ticket=ticket)


class PlannedCopy(Record, frozen=True, kw_only=True):
    """The bytes of one layer that move, per cycle, from a part of prefill's cache to a part of
    decode's."""

    prefill_part: Part
    decode_part: Part
    runs: int
    """Ranges of contiguous bytes."""
    bytes: int
    """Bytes of all runs together."""


class PlannedLayer(Record, frozen=True, kw_only=True):
    """A layer of prefill and its target at decode; each side counts from 0 on its own rank."""

    prefill_layer: int
    decode_layer: int
    copies: tuple[PlannedCopy, ...]


class PlanSummary(Record, frozen=True, kw_only=True):
    """The plan between one rank of each side. A cycle is the fewest tokens that fill whole blocks
    on both."""

    prefill_rank: int
    decode_rank: int
    layers: int
    cycle_tokens: int
    runs_per_cycle: int
    """Ranges of contiguous bytes in one cycle of all layers."""
    bytes_per_cycle: int
    """Bytes in one cycle of all layers."""
    prefill_block_size: int
    """Tokens per block."""
    decode_block_size: int
    """Tokens per block."""
    permutes: bool
    """Whether decode reorders the heads of its blocks after they have arrived."""
    layer_map: tuple[PlannedLayer, ...]
    """One entry for each of `layers`, in the order in which they move."""


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
    """Fabrics that both can use, in prefill's order of preference."""
    plan: PlanSummary
    """Plan between the ranks whose layouts are registered."""
    rank_pairs: tuple[RankPair, ...]
    """All ranks of both instances that transfer to each other."""
