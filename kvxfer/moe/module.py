"""A torch layer of experts, which are spread over the ranks of a group."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvxfer.errors import InvalidArgument
from kvxfer.moe.all_to_all import AllToAll
from kvxfer.moe.results import Combined, Dispatched, Layout


class LocalExperts(Protocol):
    """The experts of one rank."""

    @property
    def layout(self) -> Layout:
        """The layout in which it takes tokens."""

    def __call__(self, got: Dispatched) -> Tensor:
        """Returns what the experts make of `got.x`: of its shape, of any dtype. With layout
        "tokens", a row is the weighted sum of a token's local experts, else the output of one."""


class GroupedExperts(nn.Module):
    """SwiGLU networks: down @ (silu(gate @ x) * (up @ x)). Each computes all its tokens at once.

    gate_up: [local experts, 2 * inner, hidden], gate first. down: [local experts, hidden, inner].
    Both are in the order of `placement.ranks[rank]`. The experts compute in their dtype.
    """

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        count, hidden, inner = down.shape
        if gate_up.shape != (count, 2 * inner, hidden):
            raise InvalidArgument(
                f"gate_up has the shape {list(gate_up.shape)}; down is {list(down.shape)}, so it "
                f"has to be {[count, 2 * inner, hidden]}"
            )
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)

    @property
    def layout(self) -> Layout:
        return "experts"

    def forward(self, got: Dispatched) -> Tensor:
        y = torch.empty(got.x.shape, dtype=self.down.dtype)
        for expert, (begin, rows) in enumerate(
            zip(got.begins.tolist(), got.expert_rows.tolist(), strict=True)
        ):
            if rows:
                some = slice(begin, begin + rows)
                x = got.x[some]
                if got.scales is not None:
                    x = _dequantised(x, got.scales[some], got.scale_block)
                gate, up = F.linear(x.to(y.dtype), self.gate_up[expert]).chunk(2, dim=-1)
                y[some] = F.linear(F.silu(gate) * up, self.down[expert])
        return y


class MoEAllToAll(nn.Module):
    """A layer that sends each token to the ranks of its experts, computes what arrives here, and
    adds up what comes back. Inference only; tensors are on the CPU.

    A step of the group is one call at every rank. A rank without tokens calls it with none.
    Several modules may use one group in turn, in the same order at all ranks. A step that another
    rank could not begin ends with StepRefused in compute() or forward().
    """

    def __init__(self, group: AllToAll, experts: LocalExperts) -> None:
        super().__init__()
        self.group, self.experts = group, experts

    @torch.no_grad()
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, slot: int = 0) -> Combined:
        """Runs one step, with the arguments of dispatch() and the result of combine()."""
        self.dispatch(x, ids, weights, slot)
        self.compute(slot)
        return self.combine(slot)

    @torch.no_grad()
    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, slot: int = 0) -> None:
        """Begins a step. One in another slot may be under way meanwhile.

        Args:
            x: [tokens, hidden]; converted if its dtype is not that of the group's input.
            ids: integers [tokens, top_k], the experts of each token; -1: none.
            weights: floats [tokens, top_k].
        """
        dtype = getattr(torch, self.group.shape.input)
        self.group.dispatch_send(
            x.to(dtype).contiguous(), ids.contiguous(), weights.float().contiguous(), slot=slot
        )

    @torch.no_grad()
    def compute(self, slot: int = 0) -> None:
        """Runs this rank's experts in the slot's step."""
        got = self.group.dispatch_recv(slot=slot, layout=self.experts.layout)
        y = self.experts(got).to(getattr(torch, self.group.shape.combine))
        self.group.combine_send(y.contiguous(), slot=slot)

    def combine(self, slot: int = 0) -> Combined:
        """Ends the slot's step. `out` is valid until the slot's next combine(). If `missing` is not
        empty, ranks were lost in this step; the same tokens may be sent again in the next one."""
        return self.group.combine_recv(slot=slot)


def _dequantised(x: Tensor, scales: Tensor, scale_block: int) -> Tensor:
    """Returns [rows, hidden] float32."""
    return x.float() * scales.repeat_interleave(scale_block, dim=1)[:, : x.shape[1]]
