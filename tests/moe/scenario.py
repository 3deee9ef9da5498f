"""Scenarios for the ranks of a test, and their expected results in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import DType, MoeShape

EPSILON = {"float32": 2**-23, "bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3fn": 2**-4}
FP8 = "float8_e4m3fn"

Phase = Literal["before dispatch", "after dispatch", "after arrival", "after answer"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A test of a group. The ranks stop after `steps` steps, or if that is 0 when they are told
    to."""

    ranks: int
    experts: int
    top_k: int
    hidden: int = 64
    max_tokens: int = 24
    input: DType = "bfloat16"
    wire: DType | None = None
    combine: DType | None = None
    output: DType | None = None
    scale_block: int = 0
    layout: Literal["experts", "padded", "tokens"] = "experts"
    align: int = 1
    fabric: Literal["local", "tcp"] = "local"
    copies: int = 1
    routing: Literal["even", "skewed", "holes", "one rank", "repeated"] = "even"
    steps: int = 0
    overlap: bool = False
    pauses: bool = False
    numpy: bool = False
    own_memory: bool = False
    seed: int = 0
    victim: int = -1
    fault: Literal["kill", "freeze"] = "kill"
    fault_step: int = 5
    phase: Phase = "before dispatch"
    rejoin: bool = False
    min_ranks: int = 1
    refuser: int = -1
    """The rank that refuses the steps of `refused_steps`."""
    refused_steps: tuple[int, ...] = ()

    def refuses(self, step: int, rank: int) -> bool:
        return rank == self.refuser and step in self.refused_steps

    @property
    def shape(self) -> MoeShape:
        return MoeShape(
            experts=self.experts,
            hidden=self.hidden,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            input=self.input,
            wire=self.wire or self.input,
            combine=self.combine,
            output=self.output,
            scale_block=self.scale_block,
        )

    @property
    def placement(self) -> Placement:
        return Placement.even(self.experts, self.ranks, self.copies)

    def tables(self, alive: list[bool]) -> list[list[int]]:
        """Returns each rank's table. All ranks are on one host, but over tcp do not know it."""
        near = set(range(self.ranks)) if self.fabric == "local" else set()
        return [
            self.placement.table(alive, rank, near - {rank}).tolist() for rank in range(self.ranks)
        ]

    def batch(self, step: int, rank: int) -> Batch:
        random = torch.Generator().manual_seed((self.seed * 7919 + step) * 64 + rank)
        count = int(torch.randint(0, self.max_tokens + 1, (), generator=random))
        values = torch.randn(count, self.hidden, generator=random) * 3
        scales = None
        if self.input == FP8 and self.scale_block:
            scales = torch.rand((count, self.shape.scales), generator=random) + 0.01
        chances = torch.rand(count, self.experts, generator=random)
        if self.routing == "skewed":
            chances[:, : self.top_k] += 0.8
        elif self.routing == "one rank":
            chances[:, list(self.placement.ranks[-1])] += 1
        ids = chances.topk(self.top_k).indices
        if self.routing == "holes":
            holes = torch.rand(ids.shape, generator=random) < 0.4
            ids = ids.where(~holes, -1)
        if self.routing == "repeated":
            again = torch.randint(0, self.top_k, ids.shape, generator=random)
            ids = ids.gather(1, again)
        weights = torch.rand(count, self.top_k, generator=random)
        return Batch(values.to(getattr(torch, self.input)), scales, ids, weights)


@dataclass(frozen=True)
class Batch:
    """The tokens of one rank in one step."""

    x: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor

    def arrived(self, shape: MoeShape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the rows and scales that reach experts."""
        if shape.wire != FP8 or shape.input == FP8:
            return self.x.to(getattr(torch, shape.wire)), self.scales
        blocks = self.x.float().split(shape.scale_block, dim=1)
        largest = torch.stack([block.abs().amax(1) for block in blocks], dim=1)
        scales = torch.where(largest > 0, largest / 448, 1.0)
        of_elements = per_element(scales, shape)
        return (self.x.float() / of_elements).to(torch.float8_e4m3fn), scales

    def values(self, shape: MoeShape) -> torch.Tensor:
        """Returns the values that the experts compute with, in float64."""
        return as_double(*self.arrived(shape), shape)


def as_double(rows: torch.Tensor, scales: torch.Tensor | None, shape: MoeShape) -> torch.Tensor:
    return rows.double() if scales is None else rows.double() * per_element(scales, shape).double()


def per_element(scales: torch.Tensor, shape: MoeShape) -> torch.Tensor:
    """Returns scales, [rows, hidden]; the last block of a row may be short."""
    index = torch.arange(shape.hidden) // shape.scale_block
    return scales[:, index]


def expert(number: int | torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns the output of a logical expert, in float64."""
    return values * ((number % 7) - 3) / 2 + (number % 5) / 8


def expected(
    scenario: Scenario, batch: Batch, contributed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sums of a rank's tokens over the experts that contributed, and by how much
    rounding may change them."""
    shape = scenario.shape
    values = batch.values(shape)
    total = torch.zeros(values.shape, dtype=torch.float64)
    slack = torch.zeros_like(total)
    step = EPSILON[shape.combine]
    fp8 = EPSILON[FP8] if shape.wire == FP8 and shape.input != FP8 else 0.0
    for choice in range(shape.top_k):
        numbers = batch.ids[:, choice, None]
        weights = (batch.weights[:, choice] * contributed[:, choice])[:, None].double()
        answers = expert(numbers, values)
        total += weights * answers
        slack += weights * (answers.abs() * 4 * step + values.abs() * 3 * fp8 + 2**-20)
    # Below 2**-14, values of float16 are 2**-24 apart.
    return total, slack + total.abs() * 2 * EPSILON[shape.output] + 2**-24
