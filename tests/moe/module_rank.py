"""A rank of a layer of experts in torch, which compares its outputs with a dense layer."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvxfer.moe import AllToAll, MoeShape, Placement
from kvxfer.moe.module import GroupedExperts, MoEAllToAll

STEPS = 6
INNER = 96


@dataclass(frozen=True)
class Layer:
    shape: MoeShape
    placement: Placement
    tolerance: float
    """The largest error, as a fraction of the largest output."""
    overlap: bool = False
    seed: int = 5

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns the weights of all experts."""
        generator = torch.Generator().manual_seed(self.seed)
        count, hidden = self.shape.experts, self.shape.hidden
        gate_up = torch.randn((count, 2 * INNER, hidden), generator=generator) * hidden**-0.5
        down = torch.randn((count, hidden, INNER), generator=generator) * INNER**-0.5
        dtype = getattr(torch, self.shape.combine)
        return gate_up.to(dtype), down.to(dtype)

    def tokens(self, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns x, ids and weights; some ranks have no tokens in some steps."""
        generator = torch.Generator().manual_seed(self.seed + 1000 * step + rank)
        count = (rank + step) % 3 * (self.shape.max_tokens // 2)
        x = torch.randn((count, self.shape.hidden), generator=generator)
        logits = torch.randn((count, self.shape.experts), generator=generator)
        largest = logits.topk(self.shape.top_k)
        again = torch.randint(0, self.shape.top_k, largest.indices.shape, generator=generator)
        return (
            x.to(getattr(torch, self.shape.input)),
            largest.indices.gather(1, again),  # some experts twice
            largest.values.softmax(dim=-1),
        )

    def expected(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        gate_up, down = (each.double() for each in self.weights())
        rows = []
        for row, experts, of_row in zip(x.double(), ids.tolist(), shares.double(), strict=True):
            total = torch.zeros_like(row)
            for expert, share in zip(experts, of_row, strict=True):
                gate, up = F.linear(row, gate_up[expert]).chunk(2, dim=-1)
                total += share * F.linear(F.silu(gate) * up, down[expert])
            rows.append(total)
        return torch.stack(rows) if rows else x.double()


def run(layer: Layer, rank: int, driver: Connection) -> None:
    torch.set_num_threads(1)
    try:
        _take_part(layer, rank, driver)
    except BaseException:
        driver.send(traceback.format_exc())
    else:
        driver.send("")


def _take_part(layer: Layer, rank: int, driver: Connection) -> None:
    def exchange(address: str) -> list[str]:
        driver.send(address)
        addresses: list[str] = driver.recv()
        return addresses

    here = torch.tensor(layer.placement.ranks[rank])
    gate_up, down = (each[here] for each in layer.weights())
    with AllToAll(
        layer.shape,
        rank=rank,
        ranks=len(layer.placement.ranks),
        cluster_key="k" * 32,
        exchange=exchange,
        placement=layer.placement,
        timeout=60,
        fabrics=["local", "tcp"],
    ) as group:
        module = MoEAllToAll(group, GroupedExperts(gate_up, down))
        for step in range(0, STEPS, 2):
            first, second = layer.tokens(rank, step), layer.tokens(rank, step + 1)
            if not layer.overlap:
                for tokens in (first, second):
                    _compare(layer, tokens, module(*tokens).out)
                continue
            module.dispatch(*first, slot=0)
            module.dispatch(*second, slot=1)
            for slot in (0, 1):
                module.compute(slot)
            for slot, tokens in enumerate((first, second)):
                _compare(layer, tokens, module.combine(slot).out)


def _compare(layer: Layer, tokens: tuple[Tensor, Tensor, Tensor], out: Tensor) -> None:
    expected = layer.expected(*tokens)
    assert out.shape == expected.shape
    if len(out):
        wrong = (out.double() - expected).abs().max() / expected.abs().max()
        assert wrong <= layer.tolerance, float(wrong)
