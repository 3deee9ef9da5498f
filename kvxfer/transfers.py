"""What the control plane says of pairs: records that registry, REST API and client share."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvxfer.instances import Instance
from kvxfer.layout import Part


class TransferRequest(Struct, frozen=True, kw_only=True):
    """What a router asks for."""

    request_id: str | None = None
    """The router's own name for the request; one is made up where it is None."""
    model: str | None = None
    """None takes any model."""
    prompt_tokens: int | None = None
    """How many KV blocks to reserve on each side follows from it; None reserves none."""
    avoid: tuple[str, ...] = ()
    """Ids of instances that just failed this request: chosen only where their side has no other."""
    prefix_hashes: tuple[int, ...] = ()
    """Chain hashes of the prompt's beginning (kvxfer.prefix_hashes), at most 256: prefill instances
    that published them are preferred."""
    tokens_per_hash: int | None = None
    """Tokens from one of them to the next; None is the block size of the prefill instance."""
    explain: bool = False
    """Whether the transfer is to say why it got its pair."""


class Party(Struct, frozen=True, kw_only=True):
    """One side of a pair, and where to reach it."""

    instance_id: str
    epoch: int
    engine_address: str
    http_address: str
    rank_addresses: tuple[str, ...] = ()
    """The engine address of each rank, where it has registered more than one."""
    bootstrap_address: str = ""
    """Where the bootstrap server of an SGLang instance listens, HOST:PORT."""

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


class Score(Struct, frozen=True, kw_only=True):
    """Why a pair was chosen: no other pair that was looked at had less cost."""

    cost: float
    """The sum of all parts."""
    prefill: Mapping[str, float]
    """What the load of the prefill instance costs, by its parts."""
    decode: Mapping[str, float]
    pair: Mapping[str, float]
    """What the two are to each other."""
    distance: int
    """0 on one NUMA node, 1 on one host, 2 in one rack, 3 in one zone, 4 beyond."""
    prefix_tokens: int
    """Tokens of the prompt that prefill is taken to have in its cache."""


class Transfer(Struct, frozen=True, kw_only=True):
    """An open transfer: a pair that is reserved for one request until `expires_at`.

    Times are seconds since the Unix epoch.
    """

    transfer_id: str
    request_id: str
    model: str
    prompt_tokens: int | None
    prefill: Party
    decode: Party
    prefill_blocks: int
    decode_blocks: int
    created_at: float
    expires_at: float
    score: Score | None = None
    """Why this pair, where the request asked for it."""

    def blocks_on(self, instance_id: str) -> int:
        """KV blocks that it reserves on one of its two instances."""
        return (
            self.prefill_blocks if instance_id == self.prefill.instance_id else self.decode_blocks
        )


class OpenedTransfer(Transfer, frozen=True, kw_only=True):
    """The answer to a transfer request: only it carries the ticket."""

    ticket: str

    @classmethod
    def of(cls, transfer: Transfer, ticket: str) -> OpenedTransfer:
        told = {name: getattr(transfer, name) for name in Transfer.__struct_fields__}
        return cls(**told, ticket=ticket)


class PlannedCopy(Struct, frozen=True, kw_only=True):
    """What of one cycle of one layer moves from a part of prefill's to a part of decode's."""

    prefill_part: Part
    decode_part: Part
    runs: int
    """Ranges of contiguous bytes."""
    bytes: int
    """Over all runs."""


class PlannedLayer(Struct, frozen=True, kw_only=True):
    """Which layer goes where; each side counts from 0 on its own rank."""

    prefill_layer: int
    decode_layer: int
    copies: tuple[PlannedCopy, ...]


class PlanSummary(Struct, frozen=True, kw_only=True):
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
    permutes: bool
    """Whether decode puts the heads of its blocks into its own order after they have arrived."""
    layer_map: tuple[PlannedLayer, ...]
    """One for each of `layers`, in the order in which they move."""


class RankPair(Struct, frozen=True, kw_only=True):
    """A rank of prefill that writes to a rank of decode."""

    prefill_rank: int
    decode_rank: int
    layers: int
    bytes_per_token: int


class Handshake(Struct, frozen=True, kw_only=True):
    """A pair of instances that can transfer to each other."""

    prefill: Party
    decode: Party
    fabrics: tuple[str, ...]
    """The fabrics that both have, in the order that prefill prefers."""
    plan: PlanSummary
    """Between the ranks whose layouts are registered."""
    rank_pairs: tuple[RankPair, ...]
    """All ranks of both instances that transfer to each other."""
