"""The work of a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvxfer.moe import MoeShape, Placement
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.experts import require_exact

Prompt: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The work of a group, the same for every rank.

    placement: that of one layer's experts, used for all layers. prompts: those of each rank.
    max_tokens: generated for each prompt. threads: those of torch. timeout: seconds that a rank
    waits for others, longer than the longest step.

    Raises InvalidArgument.
    """

    config: LlamaConfig
    seed: int
    placement: Placement
    prompts: Sequence[Sequence[Prompt]]
    max_tokens: int
    cluster_key: str
    threads: int = 1
    timeout: float = 60.0
    fabrics: tuple[str, ...] = ("local", "tcp")

    def __post_init__(self) -> None:
        require_exact(self.config)

    @property
    def ranks(self) -> int:
        return len(self.placement.ranks)

    @property
    def shape(self) -> MoeShape:
        """The shape of a group with the experts of all layers: ranks need not be in the same layer,
        and a rank can send a layer's tokens again."""
        config = self.config
        longest = max((len(each) for prompts in self.prompts for each in prompts), default=1)
        return MoeShape(
            experts=config.num_layers * config.num_experts,
            hidden=config.hidden_size,
            top_k=config.experts_per_token,
            max_tokens=longest,
            input="float32",
            slots=1,
        )

    @property
    def placement_of_all_layers(self) -> Placement:
        experts, layers = self.config.num_experts, range(self.config.num_layers)
        return Placement(
            tuple(
                tuple(layer * experts + expert for layer in layers for expert in here)
                for here in self.placement.ranks
            )
        )

    @property
    def steps(self) -> int:
        """The steps of the group: one for each layer and token of the rank with the most tokens,
        and one for each rank that may be lost."""
        tokens = max(len(prompts) for prompts in self.prompts) * self.max_tokens
        return tokens * self.config.num_layers + self.ranks - 1
