"""The experts of all layers, spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvxfer.moe import AllToAll, Dispatched
from kvxfer.moe.module import MoEAllToAll
from kvxfer.moe.results import Layout
from kvxfer.reference.experts import answer
from kvxfer.reference.weights import ExpertWeights


class TokenExperts:
    """The experts of this rank, applied to one token after another."""

    def __init__(self, weights: Sequence[ExpertWeights]) -> None:
        """`weights` has an item for each local expert."""
        self._weights = weights

    @property
    def layout(self) -> Layout:
        return "tokens"

    def __call__(self, got: Dispatched) -> Tensor:
        y = torch.empty_like(got.x)
        for row, ids, shares, to in zip(got.x, got.ids, got.weights, y, strict=True):
            to.copy_(
                answer(
                    row,
                    (
                        (self._weights[expert], share)
                        for expert, share in zip(ids.tolist(), shares, strict=True)
                        if expert >= 0
                    ),
                )
            )
        return y


class SpreadExperts:
    """`Experts` of a model: each call is a step of the group, or more if a rank is lost in it."""

    def __init__(
        self, group: AllToAll, weights: Sequence[ExpertWeights], experts_per_layer: int
    ) -> None:
        """`weights` has an item for each local expert of the group."""
        self.repeated = 0
        """Steps that were run again because a rank was lost in them."""
        self.absent = 0
        """Outputs that the model went without, as no live rank has their expert."""
        self._module = MoEAllToAll(group, TokenExperts(weights))
        self._experts = experts_per_layer

    def __call__(self, layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        logical = ids + layer * self._experts
        while (combined := self._module(x, logical, shares)).missing:
            self.repeated += 1
        self.absent += int((~combined.contributed).sum())
        found: Tensor = combined.out
        return found

    def idle(self) -> None:
        """Takes a step in which this rank has no tokens, and computes those of others."""
        shape = self._module.group.shape
        self._module(
            torch.empty(0, shape.hidden),
            torch.empty(0, shape.top_k, dtype=torch.int64),
            torch.empty(0, shape.top_k),
        )
