"""What the control plane says of pairs: records that registry, REST API and client share."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.instances import Instance


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRequest:
    """What a router asks for."""

    request_id: str | None = None
    """The router's own name for the request; one is made up where it is None."""
    model: str | None = None
    """None takes any model."""
    prompt_tokens: int | None = None
    """How many KV blocks to reserve on each side follows from it; None reserves none."""
    avoid: tuple[str, ...] = ()
    """Ids of instances that do not come into question, as they just failed this request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One side of a pair, and where to reach it."""

    instance_id: str
    epoch: int
    engine_address: str
    http_address: str

    @classmethod
    def of(cls, instance: Instance) -> Party:
        return cls(
            instance_id=instance.instance_id,
            epoch=instance.epoch,
            engine_address=instance.engine_address,
            http_address=instance.http_address,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedTransfer(Transfer):
    """The answer to a transfer request: only it carries the ticket."""

    ticket: str

    @classmethod
    def of(cls, transfer: Transfer, ticket: str) -> OpenedTransfer:
        told = {name: getattr(transfer, name) for name in Transfer.__slots__}
        return cls(**told, ticket=ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """What moves per block of a pair."""

    layers: int
    copies_per_block: int
    """Runs of contiguous bytes that one block takes over all layers."""
    bytes_per_block: int
    """Bytes that one block takes over all layers."""
    prefill_block_size: int
    """Tokens per block."""
    decode_block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """A pair of instances that can transfer to each other."""

    prefill: Party
    decode: Party
    fabrics: tuple[str, ...]
    """The fabrics that both have, in the order that prefill prefers."""
    plan: PlanSummary
