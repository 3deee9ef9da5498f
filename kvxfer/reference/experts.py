"""The experts of a layer: which of them a token needs, and what they compute.

Each token is computed separately, by at most two experts. So the bits of a sum depend neither on
the process that has computed a part of it, nor on the order of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvxfer.errors import InvalidArgument
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.weights import ExpertWeights, expert_weights

_MOST_PER_TOKEN: Final = 2


class Experts(Protocol):
    """The experts of all layers of a model."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """Returns what they add to each token: [tokens, hidden_size], valid until the next call.

        Args:
            x: [tokens, hidden_size].
            ids, shares: int64 and float32 [tokens, experts_per_token], from route().
        """


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Returns the experts with the largest of `logits` [tokens, num_experts], and their shares,
    which add up to 1."""
    largest = logits.float().topk(experts_per_token)
    return largest.indices, largest.values.softmax(dim=-1)


def answer(row: Tensor, chosen: Iterable[tuple[ExpertWeights, Tensor]]) -> Tensor:
    """Returns the weighted sum of the outputs of some experts for one token: [hidden_size].

    Args:
        row: the token, [hidden_size].
        chosen: the experts, each with its share, a scalar.
    """
    # The copy has a fixed alignment: the bits of a product may depend on it.
    x, total = row.unsqueeze(0).clone(), torch.zeros_like(row)
    for weights, share in chosen:
        gate, up = F.linear(x, weights.gate_up).chunk(2, dim=-1)
        total += F.linear(F.silu(gate) * up, weights.down).squeeze(0) * share
    return total


def require_exact(config: LlamaConfig) -> None:
    """Raises InvalidArgument if the sum of a token's experts depends on their order."""
    if config.experts_per_token > _MOST_PER_TOKEN:
        raise InvalidArgument(
            f"{config.name}: this engine adds the outputs of {_MOST_PER_TOKEN} experts for a "
            f"token, not of {config.experts_per_token}"
        )


class DenseExperts:
    """All experts of all layers in this process, with seeded weights."""

    def __init__(self, config: LlamaConfig, seed: int) -> None:
        require_exact(config)
        self._layers: Sequence[Sequence[ExpertWeights]] = [
            [expert_weights(config, seed, layer, expert) for expert in range(config.num_experts)]
            for layer in range(config.num_layers)
        ]

    def __call__(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        weights = self._layers[layer]
        return torch.stack(
            [
                answer(
                    row, zip([weights[expert] for expert in of_row.tolist()], share, strict=True)
                )
                for row, of_row, share in zip(x, ids, shares, strict=True)
            ]
        )
