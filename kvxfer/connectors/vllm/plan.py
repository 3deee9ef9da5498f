"""The plan that the scheduler side gives the worker side each step. Plain data, pickled by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvxfer.connectors.vllm.kv_events import CacheChanges
from kvxfer.connectors.vllm.prompt_blocks import BlockTable
from kvxfer.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class TransferParams:
    """The kv_transfer_params of a request: the control plane's answer for its transfer."""

    ticket: str
    prefill_engine_address: str
    prefill_rank_addresses: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """The engine address of each rank of prefill."""
        return self.prefill_rank_addresses or (self.prefill_engine_address,)

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> TransferParams | None:
        """Reads the parameters; None for an ordinary request, without a ticket. Raises
        InvalidArgument."""
        if not params or "ticket" not in params:
            return None
        ticket, address = params["ticket"], params.get("prefill_engine_address")
        ranks = params.get("prefill_rank_addresses") or []
        if params.get("handshake", "direct") != "direct":
            raise InvalidArgument(
                f"kv_transfer_params.handshake is {params['handshake']!r}; this connector speaks "
                "the direct one"
            )
        if not (
            isinstance(ticket, str)
            and isinstance(address, str)
            and isinstance(ranks, list)
            and all(isinstance(rank, str) for rank in ranks)
        ):
            raise InvalidArgument(
                "kv_transfer_params: ticket and prefill_engine_address are strings, "
                "prefill_rank_addresses is a list of them; pass on what the control plane answered"
            )
        return cls(ticket, address, tuple(ranks))


@dataclass(frozen=True, slots=True)
class Send:
    """A step of a prompt that is computed for another instance."""

    request_id: str
    params: TransferParams
    digest: bytes
    num_blocks: int
    """Blocks of the whole prompt, in each KV cache group."""
    block_ids: BlockTable
    """The blocks that are allocated so far."""
    until: int
    """The number of the prompt's first blocks that are complete after this step."""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Receive:
    """A prompt whose blocks, from `first_block` on, come from prefill."""

    request_id: str
    params: TransferParams
    digest: bytes
    first_block: int
    block_ids: BlockTable
    adapter: str = ""


class Counted(NamedTuple):
    """The scheduler's requests and blocks before a step. Plain values: a part of each StepPlan."""

    running: int = 0
    """Requests that have been scheduled, and not preempted since."""
    waiting: int = 0
    """Requests that wait for their turn, for blocks, or for prefill."""
    free_blocks: int | None = None
    """Includes blocks that only the prefix cache holds."""
    cached_blocks: int | None = None
    """Blocks that the prefix cache holds, in use or free."""
    requests: int = 0
    """Requests since the start, without those that ended uncomputed."""
    prompt_tokens: int = 0
    """Prompt tokens of these requests."""
    output_tokens: int = 0
    """Output tokens since the start; tokens that speculation adds to a step are not counted."""


@dataclass(slots=True)
class StepPlan:
    """All that concerns transfers in one step."""

    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancels: dict[str, str] = field(default_factory=dict)
    """Requests that have ended before their transfer, and how."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are used for something else from this step on."""
    unserved: list[tuple[TransferParams, str]] = field(default_factory=list)
    """Prefill requests that ended before their first step, and how."""
    releases: list[tuple[TransferParams, str]] = field(default_factory=list)
    """Transfers that decode does not need, and why."""
    waiting: list[TransferParams] = field(default_factory=list)
    """Transfers whose decode requests wait for blocks: prefill must keep its own."""
    cached: CacheChanges = field(default_factory=CacheChanges)
    """Changes of the prefix cache."""
    counted: Counted | None = None
    """The load of the instance."""
    idle_seconds: float = 0.0
    """Seconds that the worker side may wait for a transfer to end, in a step without work."""
